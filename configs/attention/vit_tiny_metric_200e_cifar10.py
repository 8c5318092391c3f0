_base_ = './vit_tiny_dot_200e_cifar10.py'

model = dict(backbone=dict(kernel='metric'))
