_base_ = [
    '../_base_/models/resnet164.py',
    '../_base_/datasets/cifar100_bs128.py',
    '../_base_/schedules/sgd_164e.py',
]
model = dict(head=dict(num_classes=100))
