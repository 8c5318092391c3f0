_base_ = [
    '../_base_/models/resnet164.py',
    '../_base_/datasets/cifar100_bs128_autoaugment.py',
    '../_base_/schedules/sgd_164e.py',
]
model = dict(
    backbone=dict(plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), blocks='identity')]),
    head=dict(num_classes=100),
)
