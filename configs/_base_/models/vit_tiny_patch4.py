# DeiT-tiny (192 wide, 12 layers, 3 heads) on patches of 4x4 pixels, for CIFAR.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.MetricVisionTransformer',
        kernel='dot',
        arch='deit-tiny',
        img_size=32,
        patch_size=4,
        drop_path_rate=0.1,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=192,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
)
