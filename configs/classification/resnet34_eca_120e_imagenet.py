_base_ = './resnet34_org_120e_imagenet.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.ECA'))]))
