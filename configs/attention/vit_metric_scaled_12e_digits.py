# Squared distances of normalised tokens are about twice a head's width D, and weights without a
# temperature are close to 1 on the token itself. This is 1 / D.
_base_ = './vit_metric_12e_digits.py'

model = dict(backbone=dict(attention=dict(scale=1 / 16)))
