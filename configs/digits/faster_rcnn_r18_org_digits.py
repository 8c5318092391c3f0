_base_ = [
    '../_base_/models/faster_rcnn_r18_narrow.py',
    '../_base_/datasets/digits_detection.py',
    '../_base_/small_detection_runtime.py',
]
model = dict(
    rpn_head=dict(anchor_generator=dict(ratios=[1.5])),  # height / width: digits are upright
    roi_head=dict(bbox_head=dict(num_classes=10)),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', T_max=3, by_epoch=True, convert_to_iter_based=True),
]
