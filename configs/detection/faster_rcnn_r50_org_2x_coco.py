_base_ = './faster_rcnn_r50_org_1x_coco.py'

train_cfg = dict(max_epochs=24)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=24, milestones=[16, 22], gamma=0.1),
]
