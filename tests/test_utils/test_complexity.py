from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmstepnet.models import StepResNetCifar
from mmstepnet.utils.command_line import build_model, load_config
from mmstepnet.utils.complexity import measure_complexity

CONFIGS = Path(__file__).parents[2] / 'configs'
STEP_SIZES = [
    *({'type': kind} for kind in ('SqueezeExcitation', 'ECA', 'CBAM', 'SRM', 'FCA', 'SEM', 'IE')),
    *({'type': kind} for kind in ('DIA', 'StepNetAdaptor')),
    {'type': 'SGE', 'groups': 4},
    *({'type': 'StepNetAblation', 'variant': variant} for variant in 'abcd'),
]


class Classifier(nn.Module):
    """ResNet-8 with shortcuts of option A, and a linear layer."""

    def __init__(self, **kwargs):
        super().__init__()
        self.backbone = StepResNetCifar(depth=8, block='basic', shortcut='pad', **kwargs)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.backbone(x)[-1].mean((2, 3)))


def network(step_size=None, **kwargs):
    if step_size is not None:
        cfg = dict(step_size, type=f'mmstepnet.{step_size["type"]}')
        kwargs['plugins'] = [dict(cfg=cfg)]
    return Classifier(**kwargs)


def hand_count(side):
    """FLOPs of :class:`Classifier`, one block a stage, without step sizes; and channels and maps'
    elements of its blocks."""
    width = 16
    total = 3 * 9 * width * side**2 + 2 * width * side**2
    blocks = []
    for stage, channels in enumerate((16, 32, 64)):
        side = side // 2 if stage else side
        size = channels * side**2
        total += 9 * width * size + 9 * channels * size
        total += 2 * (2 * size)  # two norms: a product and a sum an element
        total += size  # identity + residual
        blocks.append((channels, size))
        width = channels
    return total + width * side**2 + width * 10, blocks  # the head: mean and linear layer


@pytest.mark.parametrize('side', (8, 12))
def test_flops_of_a_small_network_by_hand(side):
    total, blocks = hand_count(side)
    plain = measure_complexity(network(), side, side)
    assert plain.flops == total
    assert plain.step_sizes == {}
    assert plain.parts['head'].flops == 64 * 10
    last = 64 * (side // 4) ** 2
    assert plain.parts[''].flops == last  # the mean in the network's own forward
    assert plain.parts['backbone'].flops == total - 64 * 10 - last

    # A mean over the map, C to C / 16 to C channels, a sigmoid; with dt the sum is a multiply-add.
    gates = sum(size + 2 * channels * (channels // 16) + channels for channels, size in blocks)
    result = measure_complexity(network(dict(type='SqueezeExcitation')), side, side)
    assert result.step_sizes['SqueezeExcitation'].flops == gates
    assert result.flops == total + gates

    # Two means over maps, and seven a channel: the sum of both weights, a product, two
    # multiply-adds, two of the norm, a sigmoid.
    result = measure_complexity(network(dict(type='StepNetAdaptor')), side, side)
    share = result.step_sizes['StepNetAdaptor']
    assert (share.modules, share.parameters) == (3, 6 * (16 + 32 + 64))
    assert share.flops == sum(2 * size + 7 * channels for channels, size in blocks)


def test_resnet50_has_the_published_number():
    torchvision = pytest.importorskip('torchvision')
    result = measure_complexity(torchvision.models.resnet50(), 224, 224)
    # Convolutions and linear layer: 4.09 G in torchvision's own table of models.
    layers = 4_089_184_256
    # Elements of the maps that are normalised, and of those that are summed.
    maps = 64 * 112**2
    sums = 0
    shape = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))
    for width, side, blocks in shape:
        first_side = side if width == 64 else 2 * side
        maps += width * first_side**2 + (blocks - 1) * width * side**2  # first norm of a block
        maps += blocks * (width + 4 * width) * side**2 + 4 * width * side**2  # and the shortcut's
        sums += blocks * 4 * width * side**2
    assert result.flops == layers + 2 * maps + sums + 2048 * 49
    assert result.parameters == 25_557_032
    assert result.unknown == {}


@pytest.mark.parametrize('step_size', STEP_SIZES, ids=lambda cfg: ' '.join(map(str, cfg.values())))
def test_share_of_every_step_size(step_size):
    result = measure_complexity(network(step_size), 8, 8)
    plain = measure_complexity(network(), 8, 8)
    (share,) = result.step_sizes.values()
    assert (share.kind, share.modules) == (step_size['type'], 3)
    # What the step sizes cost is what the network costs more: with dt the sum is a multiply-add.
    assert share.parameters == result.parameters - plain.parameters > 0
    assert share.flops == result.flops - plain.flops > 0
    assert result.unknown == {}


def test_iebn_counts_with_its_norm():
    result = measure_complexity(network(norm_cfg=dict(type='mmstepnet.IEBN')), 8, 8)
    plain = measure_complexity(network(), 8, 8)
    share = result.step_sizes['IEBN']
    channels = 16 + 2 * (16 + 32 + 64)
    assert (share.modules, share.parameters) == (7, 4 * channels)
    assert result.parameters - plain.parameters == 2 * channels
    assert list(result.step_sizes) == ['IEBN']


@pytest.fixture
def digits_detector():
    pytest.importorskip('mmdet')
    return build_model(load_config(CONFIGS / 'digits/faster_rcnn_r18_stepnet_digits.py'))


def test_a_detector_costs_the_same_whatever_its_weights(digits_detector):
    costs = []
    for scale in (1.0, 100.0):
        for parameter in digits_detector.parameters():
            parameter.data.mul_(scale)
        costs.append(measure_complexity(digits_detector, 64, 64))
    assert costs[0] == costs[1]
    assert costs[0].unknown == {}


def test_second_stage_gets_all_proposals(digits_detector):
    few = measure_complexity(digits_detector, 60, 64)
    assert (few.proposals, few.input_shape) == (100, (3, 64, 64))
    # 100 regions of 64 x 7 x 7, two hidden layers of 256, 11 classes, 4 coordinates of 10 classes.
    # 16 numbers a region say which level it is taken from (fewer than 20 operations each).
    layers = 64 * 49 * 256 + 256 * 256 + 256 * 11 + 256 * 40
    assert 0 <= few.parts['roi_head'].flops - 100 * layers < 100 * 20
    # Per position of the four levels, strides 4 to 32: a 3x3 convolution, two 1x1 for the two
    # anchors' scores and boxes.
    positions = sum((64 // stride) ** 2 for stride in (4, 8, 16, 32))
    assert few.parts['rpn_head'].flops == positions * (9 * 64 * 64 + 64 * 2 + 64 * 8)
    digits_detector.test_cfg.rpn.max_per_img = 200
    many = measure_complexity(digits_detector, 60, 64)
    assert many.parts['roi_head'].flops == 2 * few.parts['roi_head'].flops
    assert many.parts['backbone'] == few.parts['backbone']


@pytest.mark.slow
@pytest.mark.parametrize(
    'config, side',
    {
        'detection/faster_rcnn_r50_sge_1x_coco': 64,
        'detection/mask_rcnn_r50_org_1x_coco': 64,
        'detection/retinanet_r50_stepnet_1x_coco': 64,
        'digits/resnet20_iebn_30e_digits-hard': 8,
        'classification/vit_stepnet_200e_cifar10': 32,
        'attention/vit_dot_12e_digits': 8,
        'attention/vit_l2_12e_digits': 8,
        'attention/vit_metric_12e_digits': 8,
        'attention/attentionconv_general_300e_cifar10': 32,
        'attention/attentionconv_learned_content_300e_cifar10': 32,
    }.items(),
)
def test_every_operator_of_the_configs_is_known(config, side):
    pytest.importorskip('mmdet')
    pytest.importorskip('mmpretrain')
    model = build_model(load_config(CONFIGS / f'{config}.py'))
    assert measure_complexity(model, side, side).unknown == {}


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        x = x.flatten(2)
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_fused_attention_counts_as_its_steps():
    # 3 queries and keys of 20 numbers: scores, softmax, weighted sum.
    for fused in (False, True):
        assert measure_complexity(Attention(fused), 4, 5).flops == 3 * 3 * (20 + 3 + 20)


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.i0(x) + 1


def test_unknown_operators_are_named():
    result = measure_complexity(Bessel(), 2, 2)
    assert result.unknown == {'aten::i0': 1}
    assert result.flops == 3 * 2 * 2


@pytest.mark.parametrize('height, width', ((0, 8), (8, -1), (True, 8), (8.0, 8)))
def test_sides_must_be_positive_ints(height, width):
    with pytest.raises(ValueError, match='must be a positive int'):
        measure_complexity(network(), height, width)


def test_too_small_a_picture_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 7))
    with pytest.raises(ValueError, match='3 x 4 x 5 can not be computed'):
        measure_complexity(model, 4, 5)
