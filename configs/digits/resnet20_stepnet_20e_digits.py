_base_ = './resnet20_org_20e_digits.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]))
