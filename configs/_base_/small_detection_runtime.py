# For the small sets that are trained from scratch on CPUs: 2 processes of 4 pictures each.
_base_ = 'mmdet::_base_/default_runtime.py'
custom_imports = dict(
    imports=['mmstepnet', 'mmstepnet.visualization.detection'], allow_failed_imports=False
)

randomness = dict(seed=0)
default_hooks = dict(
    logger=dict(interval=25),
    visualization=dict(score_thr=0.5),
    checkpoint=dict(max_keep_ckpts=1, save_best='coco/bbox_mAP', rule='greater'),
)
custom_hooks = [
    # Each process has its own running statistics of the norms; without this they drift apart.
    dict(type='SyncBuffersHook'),
    # Two blocks a stage: without the first there would be one, which no other can be compared with.
    dict(type='mmstepnet.StiffnessHook', exclude_first=False),
    dict(type='mmstepnet.PredictionPicturesHook', score_thr=0.5),
]
vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='mmstepnet.EnlargingDetVisualizer', vis_backends=vis_backends, line_width=2)

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=10),
)
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=3, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
auto_scale_lr = dict(enable=False, base_batch_size=8)
