# The 8x8 digits of scikit-learn: 1,347 to train with, 450 of other writers to test with.
data_preprocessor = dict(num_classes=10, mean=[78.0], std=[96.0], to_rgb=False)

train_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='mmstepnet.Digits',
        split='train',
        pipeline=[dict(type='PackInputs')],
    ),
)
val_dataloader = dict(
    batch_size=150,
    num_workers=0,
    persistent_workers=False,
    drop_last=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='mmstepnet.Digits', split='test', pipeline=[dict(type='PackInputs')]),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1,))
test_evaluator = val_evaluator
