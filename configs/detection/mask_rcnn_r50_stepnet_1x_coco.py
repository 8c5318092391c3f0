_base_ = './mask_rcnn_r50_org_1x_coco.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]))
