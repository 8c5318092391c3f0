_base_ = './resnet20_org_30e_digits-hard.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.FCA'))]))
