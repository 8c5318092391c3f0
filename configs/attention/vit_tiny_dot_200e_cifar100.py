_base_ = [
    '../_base_/models/vit_tiny_patch4.py',
    '../_base_/schedules/adamw_200e_vit.py',
    'mmpretrain::_base_/datasets/cifar100_bs16.py',
]

model = dict(head=dict(num_classes=100))
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = dict(batch_size=128)
