_base_ = ['../_base_/vit_tiny_200e.py', 'mmpretrain::_base_/datasets/cifar100_bs16.py']

model = dict(head=dict(num_classes=100))
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = dict(batch_size=128)
