_base_ = [
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/datasets/digits.py',
    '../_base_/schedules/digits_12e_adamw.py',
]
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.AttentionConvNet',
        depth=3,
        embed_dims=32,
        feedforward_channels=64,
        num_heads=9,
        in_channels=1,
        patch_size=1,
        drop_rate=0.0,
        init_cfg=dict(type='Xavier', layer='Linear'),
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=32,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
# Centres and spreads are lengths in pixels: they have further to go than weights, and decay would
# pull every head onto its query.
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys=dict(
            centers=dict(lr_mult=10.0, decay_mult=0.0), spreads=dict(lr_mult=10.0, decay_mult=0.0)
        )
    )
)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=1))
custom_hooks = [
    dict(type='mmstepnet.StiffnessHook', interval=12, figures=False),
    dict(type='mmstepnet.HeadFigureHook', interval=3),
]
