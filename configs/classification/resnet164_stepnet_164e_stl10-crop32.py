# Training on 32x32 crops, as other code of the authors does; tests are on whole pictures.
_base_ = './resnet164_stepnet_164e_stl10.py'

model = dict(backbone=dict(map_size=32))
train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='RandomCrop', crop_size=32),
            dict(type='RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='PackInputs'),
        ]
    )
)
