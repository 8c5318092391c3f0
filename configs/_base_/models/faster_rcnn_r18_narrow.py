# Faster R-CNN for small pictures, trained from scratch, light enough for CPUs: ResNet-18, an FPN of
# 64 channels, a box head of 256 units, 64 sampled regions a picture.
_base_ = 'mmdet::_base_/models/faster-rcnn_r50_fpn.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmstepnet.StepResNet',
        depth=18,
        norm_eval=False,
        zero_init_residual=False,
    ),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[4, 5.65], ratios=[1.0], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, roi_layer=dict(sampling_ratio=1)),
        bbox_head=dict(in_channels=64, fc_out_channels=256),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64, pos_fraction=0.5)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100)),
)
