_base_ = './vit_dot_12e_digits.py'

model = dict(backbone=dict(kernel='metric'))
