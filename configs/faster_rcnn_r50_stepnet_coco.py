_base_ = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)

# The trunk starts from torchvision's weights and the adaptors from their constructor. To start from
# an ImageNet training of StepNet:
# init_cfg=dict(checkpoint='work_dirs/.../epoch_120.pth', prefix='backbone.')
model = dict(
    backbone=dict(
        type='mmstepnet.StepResNet',
        plugins=[
            dict(
                cfg=dict(type='mmstepnet.StepNetAdaptor'),
                stages=(True, True, True, True),
                blocks='all',
                position='residual_step',
            )
        ],
    )
)
