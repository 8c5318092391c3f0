# Appendix F of the paper: batch 128, 164 epochs, the rate a tenth at 81 and 122.
_base_ = 'mmpretrain::_base_/default_runtime.py'
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)

optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4))
param_scheduler = dict(type='MultiStepLR', by_epoch=True, milestones=[81, 122], gamma=0.1)
train_cfg = dict(by_epoch=True, max_epochs=164, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=128)

# Batch norms keep their own running statistics on each GPU; they are averaged before validation.
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', interval=164),
]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=1, save_best='accuracy/top1'))
