import sys

import pytest
import torch
import torch.nn.functional as F

from mmstepnet.registry import MODELS
from mmstepnet.stiffness import TrajectoryRecorder

pytest.importorskip('mmpretrain')

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=32)
CONFIG = dict(
    arch=ARCH,
    img_size=8,
    patch_size=2,
    in_channels=1,
    with_cls_token=False,
    out_type='avg_featmap',
    final_norm=False,
)


def build(**kwargs):
    return MODELS.build(dict(type='mmstepnet.StepVisionTransformer', **CONFIG, **kwargs))


def randomise(net):
    with torch.no_grad():
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            if value.is_floating_point():
                value.normal_(std=0.3)
                if 'running_var' in name:
                    value.abs_().add_(0.5)
    return net


def reference(net, x):
    """Appendix G with the adaptor of equation 12, in evaluation, one operation at a time."""
    s = {key: value.double() for key, value in net.state_dict().items()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], s[f'{name}.weight'], s[f'{name}.bias'], net.ln2.eps)

    def linear(x, name):
        return x @ s[f'{name}.weight'].T + s[f'{name}.bias']

    patches = F.conv2d(
        x.double(), s['patch_embed.projection.weight'], s['patch_embed.projection.bias'], stride=2
    )
    x = patches.flatten(2).transpose(1, 2) + s['pos_embed']
    for i in range(2):
        name = f'layers.{i}'
        f = linear(norm(x, f'{name}.ln1'), f'{name}.value')
        step = f'{name}.step.step_size'
        weight = s[f'{step}.weight']
        u = weight[:, 0] * x.mean(1) + weight[:, 1] * (x + f).mean(1)
        u = (u - s[f'{step}.norm.running_mean']) / (s[f'{step}.norm.running_var'] + 1e-5).sqrt()
        u = u * s[f'{step}.norm.weight'] + s[f'{step}.norm.bias']
        dt = (u * s[f'{step}.scale'] + s[f'{step}.shift']).sigmoid()
        x = x + f * dt[:, None]
        hidden = F.gelu(linear(norm(x, f'{name}.ln2'), f'{name}.ffn.layers.0.0'))
        x = x + linear(hidden, f'{name}.ffn.layers.1')
    return norm(x.mean(1), 'ln2')


def test_equals_the_formula_and_so_does_its_deployed_form():
    net = randomise(build())
    net.eval()
    x = torch.randn(3, 1, 8, 8)
    expected = reference(net, x)
    torch.testing.assert_close(net(x)[-1].double(), expected, rtol=1e-5, atol=1e-5)
    for _ in range(2):
        net.switch_to_deploy()
        torch.testing.assert_close(net(x)[-1].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match='eval'):
        build().switch_to_deploy()


def test_every_parameter_gets_a_gradient():
    net = build(drop_path_rate=0.1, layer_scale_init_value=0.1)
    net.init_weights()
    assert torch.equal(net.layers[1].step.step_size.shift, torch.full((24,), -1.0))
    net(torch.randn(4, 1, 8, 8))[-1].square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_takes_the_values_of_mmpretrain_s_checkpoints():
    from mmpretrain.models import VisionTransformer

    oracle, net = VisionTransformer(**CONFIG), build()
    missing, unexpected = net.load_state_dict(oracle.state_dict(), strict=False)
    assert all('.step.' in key for key in missing)
    assert {key.split('.', 2)[2] for key in unexpected} == {'attn.proj.weight', 'attn.proj.bias'}
    value = oracle.layers[1].attn.qkv.weight[48:]
    assert torch.equal(net.layers[1].value.weight, value)


def test_both_sums_are_recorded():
    net = build()
    net.eval()
    with torch.no_grad(), TrajectoryRecorder(net, exclude_first=False) as record:
        net(torch.randn(2, 1, 8, 8))
    assert record.nsi.shape == (2, 4)
    at_start = 1 / (1 + torch.tensor(1.0, dtype=torch.float64).exp())
    torch.testing.assert_close(record.dt[0], torch.stack([at_start, at_start**0] * 2))


def test_other_step_sizes():
    net = build(step_size=dict(type='mmstepnet.SqueezeExcitation', reduction=4))
    assert torch.isfinite(net(torch.randn(2, 1, 8, 8))[-1]).all()
    with pytest.raises(ValueError, match='recurrent'):
        build(step_size=dict(type='mmstepnet.DIA'))


def test_without_mmpretrain_building_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmpretrain.models.backbones.vision_transformer', None)
    monkeypatch.delitem(sys.modules, 'mmstepnet.models.backbones.step_vit', raising=False)
    with pytest.raises(ImportError, match=r'pip install "mmpretrain'):
        build()


def test_frozen_layers_stay_as_they_are():
    net = randomise(build(frozen_stages=1)).train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    net(torch.randn(4, 1, 8, 8))[0].sum().backward()
    moved = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert moved and all(key.startswith('layers.1.') for key in moved)
    assert not any(p.requires_grad for p in net.layers[0].parameters())
