model = dict(
    type='ImageClassifier',
    backbone=dict(type='mmstepnet.StepResNetCifar', depth=164, block='bottleneck'),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=256,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
