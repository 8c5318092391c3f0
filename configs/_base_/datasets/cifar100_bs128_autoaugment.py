# With the policy that AutoAugment (https://arxiv.org/abs/1805.09501, appendix) found on CIFAR-10:
# one of 25 pairs of operations, each with its probability and its level from 0 to 9.
_base_ = './cifar100_bs128.py'

shear_y = dict(type='Shear', direction='vertical', magnitude_range=(0, 0.3), total_level=9)
translate_x = dict(
    type='Translate', direction='horizontal', magnitude_range=(0, 150 / 331), total_level=9
)
translate_y = dict(
    type='Translate', direction='vertical', magnitude_range=(0, 150 / 331), total_level=9
)
rotate = dict(type='Rotate', magnitude_range=(0, 30), total_level=9)
color = dict(type='ColorTransform', magnitude_range=(0, 0.9), total_level=9)
contrast = dict(type='Contrast', magnitude_range=(0, 0.9), total_level=9)
brightness = dict(type='Brightness', magnitude_range=(0, 0.9), total_level=9)
sharpness = dict(type='Sharpness', magnitude_range=(0, 0.9), total_level=9)
posterize = dict(type='Posterize', magnitude_range=(8, 4), total_level=9)
solarize = dict(type='Solarize', magnitude_range=(255, 0), total_level=9)
equalize, invert = dict(type='Equalize'), dict(type='Invert')
auto_contrast = dict(type='AutoContrast')

pairs = [
    ((invert, 0.1, 0), (contrast, 0.2, 6)),
    ((rotate, 0.7, 2), (translate_x, 0.3, 9)),
    ((sharpness, 0.8, 1), (sharpness, 0.9, 3)),
    ((shear_y, 0.5, 8), (translate_y, 0.7, 9)),
    ((auto_contrast, 0.5, 0), (equalize, 0.9, 0)),
    ((shear_y, 0.2, 7), (posterize, 0.3, 7)),
    ((color, 0.4, 3), (brightness, 0.6, 7)),
    ((sharpness, 0.3, 9), (brightness, 0.7, 9)),
    ((equalize, 0.6, 0), (equalize, 0.5, 0)),
    ((contrast, 0.6, 7), (sharpness, 0.6, 5)),
    ((color, 0.7, 7), (translate_x, 0.5, 8)),
    ((equalize, 0.3, 0), (auto_contrast, 0.4, 0)),
    ((translate_y, 0.4, 3), (sharpness, 0.2, 6)),
    ((brightness, 0.9, 6), (color, 0.2, 8)),
    ((solarize, 0.5, 2), (invert, 0.0, 0)),
    ((equalize, 0.2, 0), (auto_contrast, 0.6, 0)),
    ((equalize, 0.2, 0), (equalize, 0.6, 0)),
    ((color, 0.9, 9), (equalize, 0.6, 0)),
    ((auto_contrast, 0.8, 0), (solarize, 0.2, 8)),
    ((brightness, 0.1, 3), (color, 0.7, 0)),
    ((solarize, 0.4, 5), (auto_contrast, 0.9, 0)),
    ((translate_y, 0.9, 9), (translate_y, 0.7, 9)),
    ((auto_contrast, 0.9, 0), (solarize, 0.8, 3)),
    ((equalize, 0.8, 0), (invert, 0.1, 0)),
    ((translate_y, 0.7, 9), (auto_contrast, 0.9, 0)),
]
policies = [
    [dict(operation, prob=prob, magnitude_level=level) for operation, prob, level in pair]
    for pair in pairs
]
train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='RandomCrop', crop_size=32, padding=4),
            dict(type='RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='AutoAugment', policies=policies),
            dict(type='PackInputs'),
        ]
    )
)
