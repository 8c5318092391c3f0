_base_ = './vit_tiny_dot_200e_cifar100.py'

model = dict(backbone=dict(kernel='l2'))
