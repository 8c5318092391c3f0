_base_ = './resnet164_org_164e_stl10.py'

model = dict(backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.SRM'))]))

# The gate's parameters are trained without weight decay.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'.step.': dict(decay_mult=0.0)}))
