# 96x96 pictures: flip and a crop from 12 pixels of padding, the share of the side that CIFAR has.
data_preprocessor = dict(
    num_classes=10,
    mean=[125.307, 122.961, 113.8575],
    std=[51.5865, 50.847, 51.255],
    to_rgb=False,
)
train_dataloader = dict(
    batch_size=128,
    num_workers=4,
    dataset=dict(
        type='mmstepnet.STL10',
        data_root='data/stl10',
        split='train',
        pipeline=[
            dict(type='RandomCrop', crop_size=96, padding=12),
            dict(type='RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='PackInputs'),
        ],
    ),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    batch_size=256,
    num_workers=4,
    dataset=dict(
        type='mmstepnet.STL10',
        data_root='data/stl10',
        split='test',
        pipeline=[dict(type='PackInputs')],
    ),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
