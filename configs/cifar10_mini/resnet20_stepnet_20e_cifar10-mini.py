_base_ = './resnet20_org_20e_cifar10-mini.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]))
