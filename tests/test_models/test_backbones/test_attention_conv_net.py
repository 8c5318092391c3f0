import pytest
import torch
from torch import nn

from mmstepnet.models.backbones import AttentionConvNet
from mmstepnet.models.layers import ResidualStep

SMALL = dict(depth=2, embed_dims=12, feedforward_channels=16, num_heads=4, drop_rate=0.0)


@pytest.mark.parametrize(
    'arguments, count',
    [
        (dict(), 12_086_844),
        (dict(position='learned'), 12_278_682),
        (dict(position='learned', content=True), 29_601_882),
    ],
)
def test_parameter_counts_of_the_paper(arguments, count):
    with torch.device('meta'):
        net = nn.ModuleList([AttentionConvNet(**arguments), nn.Linear(400, 10)])
    assert sum(p.numel() for p in net.parameters()) == count


def test_equals_its_description():
    net = AttentionConvNet(**SMALL, precision='general').eval()
    x = torch.randn(2, 3, 6, 8)
    blocks = x.view(2, 3, 3, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).flatten(3)
    h = blocks @ net.embed.weight.T + net.embed.bias
    for layer in net.layers:
        attended = layer.attention(h.permute(0, 3, 1, 2), return_attention=True)[0]
        branch = layer.attention_proj(attended.permute(0, 2, 3, 1))
        h = nn.functional.layer_norm(h + branch, (12,))
        hidden = nn.functional.gelu(layer.mlp[0](h))
        h = nn.functional.layer_norm(h + layer.mlp[2](hidden), (12,))
    torch.testing.assert_close(net(x)[0], h.mean((1, 2)))


@pytest.mark.parametrize('content', [False, True])
def test_checkpointed_equals_plain_and_every_parameter_gets_a_gradient(content):
    net = AttentionConvNet(**SMALL, content=content)
    x = torch.randn(2, 3, 8, 8)
    grads = []
    for with_cp in (False, True):
        net.with_cp = with_cp
        loss = net(x)[0].square().sum()
        grads.append(torch.autograd.grad(loss, list(net.parameters())))
    torch.testing.assert_close(*grads)
    assert all(g.abs().max() > 0 for g in grads[0])


def test_both_sums_of_a_layer_are_heard():
    net = AttentionConvNet(**SMALL)
    heard = []
    for module in net.modules():
        if isinstance(module, ResidualStep):
            module.recorder = lambda step, x, f, dt: heard.append((tuple(f.shape), dt))
    net(torch.randn(2, 3, 8, 8))
    assert heard == [((2, 4, 4, 12), None)] * 4


def test_init_weights_keeps_centres_and_draws_linear_layers():
    net = AttentionConvNet(depth=1, embed_dims=64, feedforward_channels=64, num_heads=4)
    centers = net.layers[0].attention.centers.clone()
    net.init_weights()
    assert torch.equal(net.layers[0].attention.centers, centers)
    assert net.layers[0].attention.value.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_pruned_layers_differ_in_heads():
    net = AttentionConvNet(**SMALL, precision='general').eval()
    with torch.no_grad():
        net.layers[1].attention.spreads[2, 0] = 0
    assert net.prune_heads() == [[0, 1, 2, 3], [0, 1, 3]]
    assert net(torch.randn(1, 3, 4, 4))[0].isfinite().all()


def test_pruning_that_would_empty_a_layer_changes_nothing():
    net = AttentionConvNet(**SMALL, precision='general')
    with torch.no_grad():
        net.layers[0].attention.spreads[0] = 0
        net.layers[1].attention.spreads.zero_()
    with pytest.raises(ValueError, match='none of the 4 heads'):
        net.prune_heads()
    assert [layer.attention.num_heads for layer in net.layers] == [4, 4]


def test_odd_pictures_are_refused():
    with pytest.raises(ValueError, match='patch_size=2'):
        AttentionConvNet(**SMALL)(torch.randn(1, 3, 7, 8))
