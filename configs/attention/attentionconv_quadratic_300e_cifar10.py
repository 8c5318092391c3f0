# The paper's setting: 6 layers, 9 heads, SGD 0.1, batch 100, 300 epochs, 5 % of them warm-up.
_base_ = [
    'mmpretrain::_base_/datasets/cifar10_bs16.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmstepnet.AttentionConvNet'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=400,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
train_dataloader = dict(batch_size=100)
val_dataloader = dict(batch_size=100)
test_dataloader = dict(batch_size=100)
train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4),
    # Centres and spreads are lengths in pixels; decay would pull every head onto its query.
    paramwise_cfg=dict(
        custom_keys=dict(centers=dict(decay_mult=0.0), spreads=dict(decay_mult=0.0))
    ),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=15, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=15, convert_to_iter_based=True),
]
custom_hooks = [dict(type='mmstepnet.HeadFigureHook', interval=10)]
auto_scale_lr = dict(base_batch_size=100)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1, save_best='accuracy/top1'))
