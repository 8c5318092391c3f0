# For what two cores can train: 20 epochs, the rate up to 0.2 and down to nothing.
_base_ = 'mmpretrain::_base_/default_runtime.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
# Faster on CPUs.
runner_type = 'mmstepnet.ChannelsLastRunner'

optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.2, momentum=0.9, weight_decay=5e-4))
param_scheduler = dict(
    type='OneCycleLR', eta_max=0.2, total_steps=20, by_epoch=True, convert_to_iter_based=True
)
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=2)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=128)
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', interval=20),
]
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(max_keep_ckpts=1))
