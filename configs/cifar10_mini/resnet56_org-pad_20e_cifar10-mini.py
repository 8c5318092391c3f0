_base_ = './resnet20_org-pad_20e_cifar10-mini.py'

model = dict(backbone=dict(depth=56))
