_base_ = [
    '../_base_/models/faster_rcnn_r18_narrow.py',
    '../_base_/datasets/digits_detection.py',
    'mmdet::_base_/default_runtime.py',
]
model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    roi_head=dict(bbox_head=dict(num_classes=10)),
)
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=6, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4),
    clip_grad=dict(max_norm=10),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', T_max=6, end=6, by_epoch=True, convert_to_iter_based=True),
]
