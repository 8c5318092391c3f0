_base_ = './resnet164_stepnet_164e_cifar100.py'

train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='RandomCrop', crop_size=32, padding=4),
            dict(type='RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='RandomErasing', erase_prob=0.5, mode='rand'),
            dict(type='PackInputs'),
        ]
    )
)
