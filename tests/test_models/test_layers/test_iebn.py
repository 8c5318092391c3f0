import math

import pytest
import torch
from mmcv.cnn import build_norm_layer
from torch import nn

from mmstepnet.models import StepResNet, StepResNetCifar
from mmstepnet.models.layers import IEBN
from mmstepnet.models.layers.iebn import plain_norm_cfg

NORM = dict(type='mmstepnet.IEBN')


def _reference(x, weight, bias, scale, shift, mean, variance, eps=1e-5):
    """The normalised input, its scale gated by its own mean, channel by channel."""
    out = torch.empty_like(x)
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            own_mean = x[n, c].sum().item() / x[n, c].numel()
            gate = 1 / (1 + math.exp(-(scale[c].item() * own_mean + shift[c].item())))
            normalised = (x[n, c] - mean[c]) / math.sqrt(variance[c].item() + eps)
            out[n, c] = normalised * weight[c] * gate + bias[c]
    return out


@pytest.mark.parametrize('training', [True, False])
def test_equals_a_float64_reference(training):
    layer = IEBN(4).double().train(training)
    for param in layer.parameters():
        nn.init.normal_(param)
    layer.norm.running_mean.normal_()
    layer.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64) * 2 + 1
    mean, variance = layer.norm.running_mean.clone(), layer.norm.running_var.clone()
    if training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    expected = _reference(
        x, layer.weight, layer.bias, layer.gate.scale, layer.gate.shift, mean, variance
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-12)


def test_starts_as_batch_norm_times_sigmoid_minus_one():
    x = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(IEBN(3)(x), nn.BatchNorm2d(3)(x) * 0.26894143)


def test_is_built_by_norm_cfg_under_the_keys_of_batch_norm():
    name, layer = build_norm_layer(dict(NORM, requires_grad=False, momentum=0.3), 8, postfix=1)
    assert (name, type(layer), layer.norm.momentum) == ('bn1', IEBN, 0.3)
    assert not any(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize(
    ('make', 'gated', 'plain'),
    [
        # Stem, two a block; the first block of each but the first stage has a shortcut's norm.
        (lambda: StepResNetCifar(20, block='basic', norm_cfg=NORM), 1 + 2 * 9, 2),
        (lambda: StepResNet(18, base_channels=8, norm_cfg=NORM), 1 + 2 * 8, 3),
    ],
    ids=['cifar', 'resnet18'],
)
def test_replaces_the_norms_of_stem_and_blocks_but_not_of_shortcuts(make, gated, plain):
    modules = dict(make().named_modules())
    assert sum(isinstance(module, IEBN) for module in modules.values()) == gated
    inner = {f'{name}.norm' for name, module in modules.items() if isinstance(module, IEBN)}
    others = {n for n, m in modules.items() if isinstance(m, nn.BatchNorm2d)} - inner
    assert len(others) == plain and all('.downsample.' in name for name in others)


def test_synchronised_batch_norm_keeps_the_gate():
    layer = IEBN(3)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer))[0]
    assert type(converted) is IEBN
    assert type(converted.norm) is nn.SyncBatchNorm
    assert converted.gate is layer.gate


def test_bfloat16_autocast_keeps_the_dtype_of_the_input():
    layer = IEBN(3).eval()
    x = torch.randn(2, 3, 4, 4)
    with torch.autocast('cpu', torch.bfloat16):
        out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), atol=0.02, rtol=0.02)


def test_plain_norm_cfg_changes_iebn_alone():
    assert plain_norm_cfg(dict(NORM, eps=0.1)) == dict(type='BN', eps=0.1)
    assert plain_norm_cfg(dict(type='GN', num_groups=4)) == dict(type='GN', num_groups=4)
