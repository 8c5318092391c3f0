"""The networks of attention are heard by the same recorder as residual networks."""

import itertools

import pytest
import torch

from mmstepnet.models.backbones import AttentionConvNet, InformationPropagationNet
from mmstepnet.registry import MODELS
from mmstepnet.stiffness import TrajectoryRecorder


def quotients(pairs):
    rows = [f.flatten(1).double().norm(dim=1) / x.flatten(1).double().norm(dim=1) for x, f in pairs]
    return torch.stack(rows, dim=1)


def test_information_propagation_net():
    net = InformationPropagationNet(depth=3).eval()
    x = torch.randn(4, 9, 2)
    with torch.no_grad(), TrajectoryRecorder(net, exclude_first=False) as record:
        net(x)
    states = net.states(x)
    pairs = [(a, b - a) for a, b in itertools.pairwise(states)]
    torch.testing.assert_close(record.nsi, quotients(pairs), rtol=1e-5, atol=1e-6)
    assert record.stages.tolist() == [0, 0, 0]


def test_attention_conv_net_without_the_first_sum():
    net = AttentionConvNet(depth=2, embed_dims=12, feedforward_channels=16, num_heads=3).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), TrajectoryRecorder(net) as record:
        net(x)
    h = net.embed(torch.nn.functional.pixel_unshuffle(x, 2).permute(0, 2, 3, 1))
    pairs = []
    for layer in net.layers:
        attended = layer.attention(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        for step, f in (
            (layer.attention_step, layer.attention_proj(attended)),
            (layer.mlp_step, None),
        ):
            f = layer.mlp(h) if f is None else f
            pairs.append((h, f))
            h = step.activation(h + f)
    torch.testing.assert_close(record.nsi, quotients(pairs[1:]), rtol=1e-5, atol=1e-6)
    assert record.names == ['layers.0.mlp_step', 'layers.1.attention_step', 'layers.1.mlp_step']


@pytest.mark.parametrize('kernel', ['dot', 'metric'])
def test_vision_transformer_hears_two_sums_a_layer(kernel):
    pytest.importorskip('mmpretrain')
    arch = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=32)
    net = MODELS.build(
        dict(
            type='mmstepnet.MetricVisionTransformer',
            arch=arch,
            kernel=kernel,
            img_size=8,
            patch_size=2,
        )
    )
    net.init_weights()
    net.eval()
    states = []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad(), TrajectoryRecorder(net, exclude_first=False) as record:
        net(torch.randn(2, 3, 8, 8))
        pairs = []
        for layer, h in zip(net.layers, states, strict=True):
            f = layer.attn(layer.ln1(h))
            pairs += [(h, f), (h + f, layer.ffn(layer.ln2(h + f)))]
    torch.testing.assert_close(record.nsi, quotients(pairs), rtol=1e-5, atol=1e-6)
    assert record.names[0] == 'layers.0.attn_step' and record.stages.tolist() == [0] * 4
