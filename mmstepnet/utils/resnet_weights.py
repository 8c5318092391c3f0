"""ResNets that others trained, under the names of this package."""

import argparse
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmstepnet.models import ECA, StepResNet, StepResNetCifar
from mmstepnet.models.backbones.blocks import Bottleneck
from mmstepnet.models.backbones.step_resnet import ARCHITECTURES

from .checkpoint import CheckpointError, differences, load_safely

# Where trainings keep their weights: timm and torchvision, averaged ones first as timm reads them.
_CONTAINERS = ('state_dict_ema', 'model_ema', 'state_dict', 'model')
# Networks with the weights of a plain ResNet that compute something else.
_SAME_WEIGHTS = re.compile(r'resnet(aa|blur)[a-z]*\d+', re.IGNORECASE)

_NAMES = (
    (r'conv1\.(\d)\.(\w+)', r'backbone.stem.\1.\2'),
    (r'(conv1|bn1)\.(\w+)', r'backbone.\1.\2'),
    (r'(layer\d\.\d+\.(?:conv|bn)[123])\.(\w+)', r'backbone.\1.\2'),
    (r'(layer\d\.\d+)\.(?:downsample|shortcut)\.([012])\.(\w+)', r'backbone.\1.downsample.\2.\3'),
    (r'(layer\d\.\d+)\.se\.fc1\.(\w+)', r'backbone.\1.step.step_size.mlp.0.\2'),
    (r'(layer\d\.\d+)\.se\.fc2\.(\w+)', r'backbone.\1.step.step_size.mlp.2.\2'),
    (r'(layer\d\.\d+)\.se\.conv\.(weight)', r'backbone.\1.step.step_size.conv.\2'),
    (r'(?:linear|fc|classifier)\.(weight|bias)', r'head.fc.\1'),
)


def read_resnet_weights(path: str) -> tuple[dict[str, Tensor], str | None]:
    """Load the weights of a checkpoint that torchvision, timm or somebody else wrote.

    Args:
        path: A file of ``torch.save`` or ``.safetensors``, or an address that MMEngine understands
            (``https://``, ``torchvision://``). It may hold a state dict alone, or one under
            ``'state_dict'`` or ``'model'`` as training scripts write it. Averaged weights under
            ``'state_dict_ema'`` or ``'model_ema'`` come before those, since they are what such
            a script validates.

    Returns:
        The weights by name, and the entry of the checkpoint that they were found under (None for a
        state dict alone).

    Raises:
        CheckpointError: The file is missing, truncated, not safe to load or holds no weights; or
            its name, or the ``'arch'`` that timm's training notes, says that it is an anti-aliased
            ResNet: these have the weights of a plain one, but pool differently.
    """
    if str(path).endswith('.safetensors'):
        content = _read_safetensors(path)
    else:
        # The training scripts of timm and torchvision keep their arguments in the checkpoint.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = load_safely(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f'{path} holds a {type(content).__name__} instead of weights by name')
    for name in (Path(path).name, str(content.get('arch', ''))):
        if found := _SAME_WEIGHTS.search(name):
            raise CheckpointError(
                f'{path} is of {found[0]}, which blurs or averages before it strides. '
                'StepResNet does not'
            )
    container = next((key for key in _CONTAINERS if isinstance(content.get(key), Mapping)), None)
    weights = content if container is None else content[container]
    weights = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
    if not weights or not all(isinstance(key, str) for key in weights):
        raise CheckpointError(f'{path} holds no weights by name')
    return weights, container


def _read_safetensors(path: str) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f'{path} needs the package safetensors: pip install it') from error
    if not Path(path).is_file():
        raise CheckpointError(f'checkpoint {path} does not exist')
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f'{path} is not a safetensors file, or is damaged') from error


def convert_resnet(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict]:
    """Rename the weights of a ResNet for an ``ImageClassifier`` with a backbone of this package.

    With four stages it is a :class:`StepResNet`: torchvision's and timm's ResNet-18 to 152, the
    latter also with the deep stem of ResNet-C, the pooled shortcuts of ResNet-D and with
    squeeze-and-excitation or ECA, which become :class:`SqueezeExcitation` and :class:`ECA` step
    sizes. With three stages it is a :class:`StepResNetCifar`: the public implementations for
    CIFAR, with a shortcut called ``shortcut`` or ``downsample`` (none for option A) and a last
    layer called ``linear``, ``fc`` or ``classifier``.

    What leaves no trace in the weights can't be seen: other activations, gates or padding than the
    usual ones, and strides elsewhere than in a bottleneck's 3x3 convolution.

    Args:
        state_dict: The weights by name, after ``module.`` or not.

    Returns:
        The weights with ``backbone.`` and, where there is a classifier, ``head.fc.`` in front, as
        ``LinearClsHead`` has it; and the config of the backbone that they fit, nothing missing and
        nothing left.

    Raises:
        ValueError: A name that such a network has not, stages of another number or length, or
            weights that differ from the backbone's in name or shape.

    Example:
        >>> import torchvision
        >>> weights, backbone = convert_resnet(torchvision.models.resnet50().state_dict())
        >>> backbone
        {'type': 'mmstepnet.StepResNet', 'depth': 50}
    """
    weights = _rename(state_dict)
    classifier = weights.get('head.fc.weight')
    if classifier is not None and classifier.dim() != 2:
        raise ValueError(
            f'state_dict: the classifier must be linear, got weights {tuple(classifier.shape)}'
        )
    bias = weights.get('head.fc.bias')
    if classifier is not None and bias is not None and len(bias) != len(classifier):
        raise ValueError(
            f'state_dict: the classifier has {len(classifier)} outputs and {len(bias)} biases'
        )
    stages = _stage_lengths(weights)
    kind, found = (_imagenet if len(stages) == 4 else _cifar)(weights, stages)
    # Checkpoints from before torch 0.4.1 don't count batches.
    for name in [name for name in weights if name.endswith('running_mean')]:
        counter = name.replace('running_mean', 'num_batches_tracked')
        weights.setdefault(counter, torch.zeros((), dtype=torch.long))
    found['plugins'] = _step_sizes(weights, len(stages)) or None
    parameters = inspect.signature(kind).parameters
    arguments = {
        name: value
        for name, value in found.items()
        if name == 'depth' or value != parameters[name].default
    }
    with torch.device('meta'):
        backbone = kind(**arguments)
    prefix = 'backbone.'
    trunk = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    if wrong := differences(backbone, trunk):
        shown = ', '.join(f'{name}={value!r}' for name, value in arguments.items())
        raise ValueError(f'state_dict does not fit {kind.__name__}({shown}): {wrong}')
    if classifier is not None and classifier.shape[1] != backbone.feat_dim:
        raise ValueError(
            f'state_dict: the classifier takes {classifier.shape[1]} features, the network has '
            f'{backbone.feat_dim}'
        )
    return weights, dict(type=f'mmstepnet.{kind.__name__}', **arguments)


def _rename(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in state_dict.items():
        name = key.removeprefix('module.')
        if name == 'n_averaged':  # torch.optim.swa_utils.AveragedModel's
            continue
        if name.startswith('backbone.'):
            raise ValueError(
                f'state_dict: {key!r} is a name of OpenMMLab already; there is nothing to convert'
            )
        for pattern, replacement in _NAMES:
            if match := re.fullmatch(pattern, name):
                if (new := match.expand(replacement)) in renamed:
                    raise ValueError(f'state_dict: {key!r} and another name mean the same: {new}')
                renamed[new] = value
                break
        else:
            raise ValueError(
                f'state_dict: no weights named {key!r} in a ResNet with at most '
                'squeeze-and-excitation or ECA'
            )
    if 'backbone.stem.0.weight' in renamed:
        # The deep stem's last norm stands beside it at timm, inside it here.
        for name in [name for name in renamed if name.startswith('backbone.bn1.')]:
            renamed[name.replace('.bn1.', '.stem.7.')] = renamed.pop(name)
    for name in renamed:
        if re.search(r'\.mlp\.\d\.weight$', name):
            # timm's are 1x1 convolutions.
            renamed[name] = renamed[name].reshape(_shape(renamed, name)[:2])
    return renamed


def _stage_lengths(weights: Mapping[str, Tensor]) -> list[int]:
    last_block: dict[int, int] = {}
    for name in weights:
        if match := re.match(r'backbone\.layer(\d)\.(\d+)\.', name):
            stage, block = int(match[1]), int(match[2])
            last_block[stage] = max(last_block.get(stage, 0), block)
    if sorted(last_block) not in ([1, 2, 3], [1, 2, 3, 4]):
        raise ValueError(
            'state_dict: a ResNet has stages layer1 to layer4, or to layer3 for CIFAR, found '
            + (', '.join(f'layer{stage}' for stage in sorted(last_block)) or 'none')
        )
    return [last_block[stage] + 1 for stage in sorted(last_block)]


def _shape(weights: Mapping[str, Tensor], name: str) -> torch.Size:
    if name not in weights or weights[name].dim() != 4:
        raise ValueError(f'state_dict: no weights of a convolution for {name!r}')
    return weights[name].shape


def _is_bottleneck(weights: Mapping[str, Tensor]) -> bool:
    return 'backbone.layer1.0.conv3.weight' in weights


def _width(weights: Mapping[str, Tensor], stage: int) -> int:
    last = 3 if _is_bottleneck(weights) else 2
    return _shape(weights, f'backbone.layer{stage}.0.conv{last}.weight')[0]


def _imagenet(weights: Mapping[str, Tensor], stages: list[int]) -> tuple[type, dict]:
    bottleneck = _is_bottleneck(weights)
    depths = [
        depth
        for depth, (block, lengths) in ARCHITECTURES.items()
        if list(lengths) == stages and (block is Bottleneck) == bottleneck
    ]
    if not depths:
        raise ValueError(
            f'state_dict: stages of {stages} {"bottleneck" if bottleneck else "basic"} blocks; '
            f'StepResNet has the depths {", ".join(map(str, ARCHITECTURES))}'
        )
    deep_stem = 'backbone.stem.0.weight' in weights
    stem = 'backbone.stem.{}.weight' if deep_stem else 'backbone.conv1.weight'
    stem_channels = _shape(weights, stem.format(6))[0]
    base_channels = _width(weights, stage=1) // (4 if bottleneck else 1)
    return StepResNet, dict(
        depth=depths[0],
        in_channels=_shape(weights, stem.format(0))[1],
        stem_channels=None if stem_channels == base_channels else stem_channels,
        base_channels=base_channels,
        deep_stem=deep_stem,
        avg_down=any(re.search(r'\.downsample\.2\.', name) for name in weights),
    )


def _cifar(weights: Mapping[str, Tensor], stages: list[int]) -> tuple[type, dict]:
    if len(set(stages)) != 1:
        raise ValueError(
            f'state_dict: a CIFAR ResNet has stages of equal length, found {stages} blocks'
        )
    bottleneck = _is_bottleneck(weights)
    first = 'backbone.layer{}.0.conv1.weight'
    return StepResNetCifar, dict(
        depth=(9 if bottleneck else 6) * stages[0] + 2,
        block='bottleneck' if bottleneck else 'basic',
        widths=tuple(_shape(weights, first.format(i))[0] for i in (1, 2, 3)),
        in_channels=_shape(weights, 'backbone.conv1.weight')[1],
        shortcut='projection' if any('.downsample.' in name for name in weights) else 'pad',
    )


def _step_sizes(weights: Mapping[str, Tensor], stages: int) -> list[dict]:
    """The plugins for the attention of each stage's first block, one for the stages that agree."""
    found: list[tuple[dict, list[bool]]] = []
    for stage in range(stages):
        cfg = _step_size(weights, stage + 1)
        if cfg is None:
            continue
        mask = next((mask for known, mask in found if known == cfg), None)
        if mask is None:
            mask = [False] * stages
            found.append((cfg, mask))
        mask[stage] = True
    return [
        dict(cfg=cfg) if all(mask) else dict(cfg=cfg, stages=tuple(mask)) for cfg, mask in found
    ]


def _step_size(weights: Mapping[str, Tensor], stage: int) -> dict | None:
    prefix = f'backbone.layer{stage}.0.step.step_size.'
    if (weight := weights.get(f'{prefix}mlp.0.weight')) is not None:
        hidden, channels = weight.shape
        cfg: dict = dict(type='mmstepnet.SqueezeExcitation')
        if (reduction := channels // hidden) != 16:
            cfg.update(reduction=reduction)
        if f'{prefix}mlp.0.bias' not in weights:
            cfg.update(bias=False)
        return cfg
    if (weight := weights.get(f'{prefix}conv.weight')) is not None:
        cfg = dict(type='mmstepnet.ECA')
        usual = ECA(_width(weights, stage)).conv.kernel_size
        if (kernel_size := weight.shape[2:]) != usual:
            cfg.update(kernel_size=kernel_size[0])
        return cfg
    return None
