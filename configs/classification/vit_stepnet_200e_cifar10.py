_base_ = [
    '../_base_/models/vit_small_patch4.py',
    '../_base_/datasets/cifar10_bs128.py',
    '../_base_/schedules/adamw_200e_vit.py',
]
