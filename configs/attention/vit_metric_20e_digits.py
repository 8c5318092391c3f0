_base_ = './vit_dot_20e_digits.py'

model = dict(backbone=dict(kernel='metric'))
