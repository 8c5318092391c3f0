_base_ = './attentionconv_quadratic_300e_cifar10.py'

model = dict(backbone=dict(precision='general', num_heads=16))
