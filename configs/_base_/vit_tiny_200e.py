# DeiT-tiny (192 wide, 12 layers, 3 heads) on patches of 4x4 pixels, for CIFAR.
_base_ = 'mmpretrain::_base_/default_runtime.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.MetricVisionTransformer',
        kernel='dot',
        arch='deit-tiny',
        img_size=32,
        patch_size=4,
        drop_path_rate=0.1,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=192,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
)
train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys=dict(cls_token=dict(decay_mult=0.0), pos_embed=dict(decay_mult=0.0)),
    ),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=10, convert_to_iter_based=True),
]
auto_scale_lr = dict(base_batch_size=128)
