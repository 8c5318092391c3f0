_base_ = './faster_rcnn_r18_org_digits.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.SqueezeExcitation'))]))
