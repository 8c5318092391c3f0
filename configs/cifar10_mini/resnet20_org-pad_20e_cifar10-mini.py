# He et al.'s option A: no projection in the shortcuts. With the normalisation that published
# checkpoints of these networks expect; see docs/stiffness.md.
_base_ = './resnet20_org_20e_cifar10-mini.py'

model = dict(backbone=dict(shortcut='pad'))
data_preprocessor = dict(
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
)
