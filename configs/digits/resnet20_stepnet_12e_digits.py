_base_ = './resnet20_org_12e_digits.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]))
