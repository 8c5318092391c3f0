# 8x8 patches of 4x4 pixels, 9 layers 192 wide with 12 heads; the mean of the patches is read out.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.StepVisionTransformer',
        arch=dict(embed_dims=192, num_layers=9, num_heads=12, feedforward_channels=384),
        img_size=32,
        patch_size=4,
        with_cls_token=False,
        out_type='avg_featmap',
        final_norm=False,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=192,
        loss=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
)
