_base_ = './resnet164_org_164e_stl10.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.ECA'))]))
