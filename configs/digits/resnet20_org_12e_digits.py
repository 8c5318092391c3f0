_base_ = [
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/datasets/digits.py',
    '../_base_/schedules/digits_12e.py',
]
model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmstepnet.StepResNetCifar', depth=20, block='basic', in_channels=1),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=1))
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', interval=12, figures=False),
]
