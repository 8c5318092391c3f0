_base_ = [
    '../_base_/models/resnet20.py',
    '../_base_/datasets/cifar10_mini.py',
    '../_base_/schedules/onecycle_20e.py',
]
