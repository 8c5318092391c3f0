_base_ = [
    '../_base_/models/resnet164.py',
    '../_base_/datasets/stl10_bs128.py',
    '../_base_/schedules/sgd_164e.py',
]
model = dict(backbone=dict(map_size=96))
