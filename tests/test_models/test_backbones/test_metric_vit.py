import subprocess
import sys

import pytest
import torch

from mmstepnet.models.layers import MetricAttention, ResidualStep
from mmstepnet.registry import MODELS

pytest.importorskip('mmpretrain')

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=32)
CONFIG = dict(arch=ARCH, img_size=8, patch_size=2, in_channels=1)


def build(**kwargs):
    return MODELS.build(dict(type='mmstepnet.MetricVisionTransformer', **CONFIG, **kwargs))


def plain(**kwargs):
    from mmpretrain.models import VisionTransformer

    return VisionTransformer(**CONFIG, **kwargs)


@pytest.mark.parametrize('layer_scale_init_value', [0.0, 0.3])
def test_dot_with_the_weights_of_mmpretrain_is_mmpretrain_s(layer_scale_init_value):
    oracle = plain(layer_scale_init_value=layer_scale_init_value)
    oracle.init_weights()
    net = build(kernel='dot', layer_scale_init_value=layer_scale_init_value)
    oracle.eval(), net.eval()
    state = {
        key.replace('attn.gamma1', 'attn_scale'): value
        for key, value in oracle.state_dict().items()
    }
    net.load_state_dict(state)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(net(x), oracle(x))


@pytest.mark.parametrize('kernel', ['metric', 'l2'])
def test_checkpoints_of_mmpretrain_lack_the_metric_alone(kernel):
    oracle, net = plain(), build(kernel=kernel)
    missing, unexpected = net.load_state_dict(oracle.state_dict(), strict=False)
    assert unexpected == []
    names = {'metric': ['hidden.weight', 'hidden.bias', 'metric.weight'], 'l2': ['metric.weight']}
    assert missing == [f'layers.{i}.attn.{name}' for i in range(2) for name in names[kernel]]
    value = oracle.layers[1].attn.qkv.weight[48:]
    assert torch.equal(net.layers[1].attn.value.weight, value)


def test_options_reach_the_attention_and_both_sums_are_steps():
    net = build(kernel='l2', drop_rate=0.2, qkv_bias=False, attention=dict(scale=0.5))
    attention = [m for m in net.modules() if isinstance(m, MetricAttention)]
    assert [(m.kernel, m.scale, m.proj_drop.p, m.value.bias) for m in attention] == [
        ('l2', 0.5, 0.2, None)
    ] * 2
    assert sum(isinstance(m, ResidualStep) for m in net.modules()) == 4


def test_every_parameter_gets_a_gradient_and_frozen_ones_none():
    net = build(frozen_stages=1)
    net.init_weights()
    net(torch.randn(2, 1, 8, 8))[-1].square().sum().backward()
    for name, param in net.named_parameters():
        frozen = not name.startswith(('layers.1.', 'ln1.'))
        assert (param.grad is None) == frozen, name


def test_importing_models_does_not_import_mmpretrain():
    code = 'import sys, mmstepnet.models; assert "mmpretrain" not in sys.modules'
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True)


def test_without_mmpretrain_building_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmpretrain.models.backbones.vision_transformer', None)
    monkeypatch.delitem(sys.modules, 'mmstepnet.models.backbones.metric_vit', raising=False)
    with pytest.raises(ImportError, match=r'pip install "mmpretrain'):
        build()
