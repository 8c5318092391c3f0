import math

import pytest
import torch
from torch import nn

from mmstepnet.models.layers import RelativeAttention2d, attention_from_conv

CONFIGS = {
    'quadratic': dict(),
    'general': dict(precision='general'),
    'learned': dict(position='learned', max_size=5),
    'quadratic, content': dict(content=True),
    'learned, content': dict(position='learned', content=True, max_size=5),
}


def make(name, channels=4, out=6, heads=3):
    layer = RelativeAttention2d(channels, out, heads, **CONFIGS[name])
    if name != 'learned' and 'learned' not in name:
        # Away from the symmetric start, so that row and column can't be mixed up.
        with torch.no_grad():
            layer.spreads += 0.3 * torch.randn_like(layer.spreads)
    return layer


def reference(layer, x):
    """Every query, key and head by itself in float64, from the formulas."""
    w = {k: v.double() for k, v in layer.state_dict().items()}
    x = x.double()
    n, channels, height, width = x.shape
    pixels = [(i, j) for i in range(height) for j in range(width)]
    attention = torch.zeros(n, layer.num_heads, len(pixels), len(pixels), dtype=torch.float64)
    out = torch.zeros(n, layer.out_channels, height, width, dtype=torch.float64)
    for b in range(n):
        for h in range(layer.num_heads):
            part = slice(h * channels, (h + 1) * channels)
            for q, (qi, qj) in enumerate(pixels):
                scores = []
                for ki, kj in pixels:
                    if layer.position == 'learned':
                        row = w['row_embedding'][ki - qi + layer.max_size - 1]
                        col = w['col_embedding'][kj - qj + layer.max_size - 1]
                        score = row @ w['row_keys.weight'][h] + col @ w['col_keys.weight'][h]
                    else:
                        offset = torch.tensor([ki - qi, kj - qj], dtype=torch.float64)
                        offset = offset - w['centers'][h]
                        m = w['spreads'][h]
                        moved = m @ offset if layer.precision == 'general' else m * offset
                        score = -(moved @ moved)
                    if layer.content:
                        query = w['query.weight'][part] @ x[b, :, qi, qj] + w['query.bias'][part]
                        key = w['key.weight'][part] @ x[b, :, ki, kj] + w['key.bias'][part]
                        score = score + query @ key / math.sqrt(channels)
                    scores.append(score)
                weights = torch.stack(scores).softmax(0)
                attention[b, h, q] = weights
                mixed = sum(weights[k] * x[b, :, i, j] for k, (i, j) in enumerate(pixels))
                out[b, :, qi, qj] += w['value.weight'][:, part] @ mixed
    return out + w['value.bias'][:, None, None], attention


@pytest.mark.parametrize('name', CONFIGS)
def test_equals_float64_loops(name):
    layer = make(name)
    x = torch.randn(2, 4, 3, 4)
    expected, expected_attention = reference(layer, x)
    out, attention = layer(x, return_attention=True)
    torch.testing.assert_close(attention.double(), expected_attention, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('name', CONFIGS)
def test_every_parameter_gets_the_explicit_path_s_gradient(name):
    layer = make(name).double()
    x = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    weight = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    grads = []
    for explicit in (True, False):
        out = layer(x, return_attention=explicit)
        out = out[0] if explicit else out
        grads.append(torch.autograd.grad((out * weight).sum(), list(layer.parameters())))
    torch.testing.assert_close(*grads)
    assert all(g.abs().max() > 0 for g in grads[0])


def test_weights_are_no_larger_than_the_sides_for_position_alone():
    # (H W)^2 x heads would be 9 * 4096^2 numbers, 600 MB; saved for the backward pass are the
    # factors and heads x input.
    saved = []
    layer = RelativeAttention2d(2, 2, num_heads=9)
    x = torch.randn(2, 2, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, id):
        layer(x)
    assert max(saved) <= 9 * x.numel()


def test_weights_of_the_general_precision_are_made_once_for_all_samples():
    saved = []
    layer = RelativeAttention2d(2, 2, num_heads=3, precision='general')
    x = torch.randn(8, 2, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, id):
        layer(x)
    assert max(saved) == 3 * 64**2


@pytest.mark.parametrize('kernel_size', [1, 3, 5, 7])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('size', [(9, 14), (4, 3)])
def test_attention_from_conv_computes_the_convolution(kernel_size, bias, size):
    conv = nn.Conv2d(5, 8, kernel_size, padding=kernel_size // 2, bias=bias)
    attention = attention_from_conv(conv)
    assert attention.num_heads == kernel_size**2
    x = torch.randn(2, 5, *size)
    expected, out = conv(x), attention(x)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    'options',
    [
        dict(kernel_size=3, padding=1, stride=2),
        dict(kernel_size=(3, 5), padding=(1, 2), stride=(3, 1)),
        dict(kernel_size=3, padding=2, dilation=2),
        dict(kernel_size=3, padding=1, groups=2),
        dict(kernel_size=3, padding=1, groups=4, stride=2),
        dict(kernel_size=2, padding='same'),
        dict(kernel_size=4, padding='same', dilation=3),
        dict(kernel_size=2, padding=1, dilation=2),
        dict(kernel_size=1, padding='valid'),
    ],
)
def test_attention_from_conv_with_options(options):
    conv = nn.Conv2d(4, 8, **options).double()
    attention = attention_from_conv(conv)
    x = torch.randn(2, 4, 7, 10, dtype=torch.float64)
    torch.testing.assert_close(attention(x), conv(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        attention(x, return_attention=True)[0], conv(x), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(kernel_size=3), 'padding'),
        (dict(kernel_size=2, padding=1), 'even kernels'),
        (dict(kernel_size=3, padding=1, dilation=2), 'dilation'),
        (dict(kernel_size=3, padding=1, padding_mode='circular'), 'padding_mode'),
    ],
)
def test_attention_from_conv_refuses_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        attention_from_conv(nn.Conv2d(4, 4, **options))


def test_attention_from_conv_refuses_what_is_no_convolution():
    with pytest.raises(TypeError, match='Linear'):
        attention_from_conv(nn.Linear(2, 2))


def test_a_moved_centre_moves_the_window():
    layer = RelativeAttention2d(1, 1, num_heads=2)
    with torch.no_grad():
        layer.centers.copy_(torch.tensor([[1.0, 0.0], [0.0, -2.0]]))
        layer.spreads.fill_(10)
    attention = layer.position_attention(6, 7)
    assert attention[0, 2, 3].argmax() == 3 * 7 + 3
    assert attention[1, 2, 3].argmax() == 2 * 7 + 1


def test_pruning_removes_stripes_and_means_and_keeps_the_rest():
    layer = RelativeAttention2d(3, 5, num_heads=4, precision='general', content=True)
    with torch.no_grad():
        layer.spreads[1] = torch.tensor([[1.0, 0.0], [0.0, 0.03]])  # condition 1111
        layer.spreads[2] = 1e-3 * torch.eye(2)
        layer.value.weight.unflatten(1, (4, 3))[:, 1:3] = 0
    torch.testing.assert_close(layer.head_conditions()[1].item(), 1 / 0.03**2)
    x = torch.randn(2, 3, 4, 4)
    expected = layer(x)
    assert layer.prune_heads().tolist() == [0, 3]
    torch.testing.assert_close(layer(x), expected)
    assert layer.num_heads == 2
    assert layer.value.weight.shape == (5, 6)


def test_pruning_everything_is_refused():
    layer = RelativeAttention2d(3, 5, num_heads=2)
    with torch.no_grad():
        layer.spreads.zero_()
    with pytest.raises(ValueError, match='none of the 2 heads'):
        layer.prune_heads()
    assert layer.num_heads == 2


def test_half_precision():
    for name in CONFIGS:
        layer = make(name)
        x = torch.randn(2, 4, 3, 4)
        with torch.autocast('cpu', torch.bfloat16):
            out = layer(x)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), layer(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(position='sine'), "position='sine'"),
        (dict(precision='diagonal'), "precision='diagonal'"),
        (dict(precision='general', position='learned'), "precision='general'"),
        (dict(num_heads=0), 'num_heads=0'),
        (dict(stride=0), 'stride=0'),
        (dict(content=True, stride=2), 'content=True'),
        (dict(position='learned', padding=1), "position='learned'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RelativeAttention2d(4, 4, **arguments)


def test_an_input_beyond_the_learned_offsets_is_refused():
    with pytest.raises(ValueError, match='max_size=5'):
        make('learned')(torch.randn(1, 4, 3, 6))
    with pytest.raises(ValueError, match='learned'):
        make('learned').head_conditions()
