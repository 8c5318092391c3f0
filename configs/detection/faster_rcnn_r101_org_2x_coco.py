_base_ = './faster_rcnn_r50_org_2x_coco.py'

model = dict(
    backbone=dict(depth=101, init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet101'))
)
