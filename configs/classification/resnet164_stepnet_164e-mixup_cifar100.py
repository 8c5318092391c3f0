_base_ = './resnet164_stepnet_164e_cifar100.py'

model = dict(
    head=dict(loss=dict(use_soft=True)),
    train_cfg=dict(augments=dict(type='Mixup', alpha=1.0)),
)
