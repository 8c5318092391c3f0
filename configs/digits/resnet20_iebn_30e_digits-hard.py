_base_ = './resnet20_org_30e_digits-hard.py'

model = dict(backbone=dict(norm_cfg=dict(type='mmstepnet.IEBN')))
