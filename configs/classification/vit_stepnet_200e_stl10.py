_base_ = [
    '../_base_/models/vit_small_patch4.py',
    '../_base_/datasets/stl10_bs128.py',
    '../_base_/schedules/adamw_200e_vit.py',
]
model = dict(backbone=dict(img_size=96, patch_size=12))
