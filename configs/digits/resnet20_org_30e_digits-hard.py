# The benchmark: 20 digits of each class to train with, and noise on all of them.
_base_ = './resnet20_org_12e_digits.py'

model = dict(backbone=dict(map_size=8))
train_dataloader = dict(batch_size=50, dataset=dict(train_per_class=20, noise=0.25))
val_dataloader = dict(batch_size=450, dataset=dict(noise=0.25))
test_dataloader = dict(batch_size=450, dataset=dict(noise=0.25))
train_cfg = dict(max_epochs=30)
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', interval=30, figures=False),
]
