# A small vision transformer on 16 patches of 2x2 pixels, whose mean is classified.
_base_ = [
    'mmpretrain::_base_/default_runtime.py',
    '../_base_/datasets/digits.py',
    '../_base_/schedules/digits_12e_adamw.py',
]
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.MetricVisionTransformer',
        kernel='dot',
        arch=dict(embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=128),
        img_size=8,
        patch_size=2,
        in_channels=1,
        out_type='avg_featmap',
        with_cls_token=False,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(max_keep_ckpts=1))
custom_hooks = [dict(type='mmstepnet.StiffnessHook', interval=12, figures=False)]
