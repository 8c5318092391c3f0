_base_ = './faster_rcnn_r101_org_2x_coco.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]))
