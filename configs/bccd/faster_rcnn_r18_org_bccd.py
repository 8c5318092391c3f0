_base_ = [
    '../_base_/models/faster_rcnn_r18_narrow.py',
    '../_base_/datasets/bccd_detection.py',
    '../_base_/small_detection_runtime.py',
]
model = dict(roi_head=dict(bbox_head=dict(num_classes=3)))
train_cfg = dict(max_epochs=12, val_interval=3)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', T_max=12, by_epoch=True, convert_to_iter_based=True),
]
