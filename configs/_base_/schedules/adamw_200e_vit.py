# The paper does not tell how its transformers were trained; this is a usual recipe for small ones.
_base_ = 'mmpretrain::_base_/default_runtime.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)

optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        custom_keys={
            'cls_token': dict(decay_mult=0.0),
            'pos_embed': dict(decay_mult=0.0),
            '.step.': dict(decay_mult=0.0),
        },
    ),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=10, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=128)
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', interval=200),
]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1, save_best='accuracy/top1'))
