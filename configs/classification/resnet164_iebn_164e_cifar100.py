_base_ = './resnet164_org_164e_cifar100.py'

model = dict(backbone=dict(norm_cfg=dict(type='mmstepnet.IEBN')))
