"""Checkpoints of CIFAR ResNets that others trained, under the names of this package."""

import re

import torch

_LAYER = re.compile(
    r'(conv1|bn1|layer(?P<stage>[123])\.(?P<block>\d+)\.'
    r'(conv[123]|bn[123]|(shortcut|downsample)\.[01]))\.\w+'
)
_HEAD = re.compile(r'(linear|fc|classifier)\.(?P<name>weight|bias)')


def convert_cifar_resnet(state_dict: dict) -> tuple[dict, dict]:
    """Rename the weights of a CIFAR ResNet for an ``ImageClassifier`` with ``StepResNetCifar``.

    Understands the names that the public implementations use: ``conv1``, ``bn1``,
    ``layer1.0.conv1``, a shortcut called ``shortcut`` or ``downsample`` (none for option A), a last
    layer called ``linear``, ``fc`` or ``classifier``, all of it after ``module.`` or not.

    Args:
        state_dict: As loaded; a checkpoint that holds it under ``'state_dict'`` is taken as well.

    Returns:
        The state dict with ``backbone.`` and ``head.fc.`` in front, as ``LinearClsHead`` has it,
        and the arguments of the backbone that it fits: ``depth``, ``block``, ``shortcut``,
        ``widths`` and, in it too, ``in_channels``.

    Raises:
        ValueError: A name that such a network has not, or stages of unequal length.

    Example:
        >>> state, backbone = convert_cifar_resnet(torch.load(path))  # doctest: +SKIP
        >>> backbone['depth'], backbone['block'], backbone['shortcut']  # doctest: +SKIP
        (20, 'basic', 'pad')
    """
    state_dict = state_dict.get('state_dict', state_dict)
    converted = {}
    lengths = {1: 0, 2: 0, 3: 0}
    for key, value in state_dict.items():
        name = key.removeprefix('module.')
        if head := _HEAD.fullmatch(name):
            converted[f'head.fc.{head["name"]}'] = value
        elif layer := _LAYER.fullmatch(name):
            converted['backbone.' + name.replace('.shortcut.', '.downsample.')] = value
            if layer['stage']:
                stage = int(layer['stage'])
                lengths[stage] = max(lengths[stage], int(layer['block']) + 1)
        else:
            raise ValueError(f'state_dict: a CIFAR ResNet has no weights named {key!r}')
    if len(set(lengths.values())) != 1 or not lengths[1]:
        raise ValueError(
            'state_dict: a CIFAR ResNet has three stages of equal length, found '
            f'{list(lengths.values())} blocks'
        )
    # Checkpoints from before torch 0.4.1 don't count batches.
    for key in [k for k in converted if k.endswith('running_mean')]:
        counter = key.replace('running_mean', 'num_batches_tracked')
        converted.setdefault(counter, torch.zeros((), dtype=torch.long))

    is_bottleneck = 'backbone.layer1.0.conv3.weight' in converted
    stem = converted['backbone.conv1.weight']
    backbone = dict(
        depth=(9 if is_bottleneck else 6) * lengths[1] + 2,
        block='bottleneck' if is_bottleneck else 'basic',
        shortcut='projection' if any('.downsample.' in k for k in converted) else 'pad',
        widths=tuple(len(converted[f'backbone.layer{i}.0.conv1.weight']) for i in (1, 2, 3)),
        in_channels=stem.shape[1],
    )
    return converted, backbone
