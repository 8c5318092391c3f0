# The same with self-attention in place of the step.
_base_ = './vit_stepnet_200e_cifar10.py'

model = dict(backbone=dict(type='mmstepnet.MetricVisionTransformer', kernel='dot'))
