# The same for transformers.
_base_ = './digits_12e.py'
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=1.0),
)
