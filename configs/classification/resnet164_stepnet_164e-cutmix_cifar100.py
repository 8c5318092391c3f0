_base_ = './resnet164_stepnet_164e_cifar100.py'

# Half of the batches, as the paper of CutMix does on CIFAR.
model = dict(
    head=dict(loss=dict(use_soft=True)),
    train_cfg=dict(augments=dict(type='CutMix', alpha=1.0), probs=[0.5]),
)
