_base_ = './attentionconv_quadratic_300e_cifar10.py'

model = dict(backbone=dict(position='learned'))
custom_hooks = []
