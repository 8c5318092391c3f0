import math

import pytest
import torch
from torch import nn

from mmstepnet.models.layers import MetricAttention
from mmstepnet.models.layers.metric_attention import distance_attention

KERNELS = ('metric', 'l2', 'dot')


def reference(layer: MetricAttention, x: torch.Tensor, allowed=None):
    """One query, one key, one head at a time in float64, from the formulas of the paper."""
    weights = {k: v.double() for k, v in layer.state_dict().items()}
    x = x.double()
    batch, length, dims = x.shape
    width = dims // layer.num_heads
    out = torch.zeros(batch, length, dims, dtype=torch.float64)
    attention = torch.zeros(batch, layer.num_heads, length, length, dtype=torch.float64)
    for n in range(batch):
        value = x[n] @ weights['value.weight'].T + weights['value.bias']
        if layer.kernel == 'dot':
            both = x[n] @ weights['query_key.weight'].T + weights['query_key.bias']
            query, key = both[:, :dims], both[:, dims:]
        elif layer.kernel == 'l2':
            mapped = x[n] @ weights['metric.weight'].T
        else:
            hidden = torch.tanh(x[n] @ weights['hidden.weight'].T + weights['hidden.bias'])
            mapped = x[n] + hidden @ weights['metric.weight'].T
        for h in range(layer.num_heads):
            part = slice(h * width, (h + 1) * width)
            for i in range(length):
                score = {}
                for j in range(length):
                    if allowed is not None and not allowed[n, i, j]:
                        continue
                    if layer.kernel == 'dot':
                        score[j] = float(query[i, part] @ key[j, part]) / math.sqrt(width)
                    else:
                        score[j] = -float(((mapped[i, part] - mapped[j, part]) ** 2).sum())
                if not score:
                    continue
                top = max(score.values())
                total = sum(math.exp(s - top) for s in score.values())
                for j, s in score.items():
                    attention[n, h, i, j] = math.exp(s - top) / total
            out[n, :, part] = attention[n, h] @ value[:, part]
    return out @ weights['proj.weight'].T + weights['proj.bias'], attention


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('training', [True, False])
def test_equals_float64_loops(kernel, training):
    layer = MetricAttention(12, num_heads=3, kernel=kernel).train(training)
    x = torch.randn(2, 7, 12)
    out, attention = layer(x, return_attention=True)
    expected, expected_attention = reference(layer, x)
    torch.testing.assert_close(attention.double(), expected_attention, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize('kernel', KERNELS)
def test_masked_equals_loops_over_what_is_allowed(kernel):
    layer = MetricAttention(8, num_heads=2, kernel=kernel)
    x = torch.randn(2, 5, 8)
    allowed = torch.rand(2, 5, 5) < 0.6
    allowed[0, 2] = False
    expected, expected_attention = reference(layer, x, allowed)
    additive = torch.zeros(2, 1, 5, 5).masked_fill(~allowed[:, None], -math.inf)
    for mask in (allowed[:, None], additive):
        out, attention = layer(x, attn_mask=mask, return_attention=True)
        torch.testing.assert_close(attention.double(), expected_attention, rtol=0, atol=1e-6)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(layer(x, attn_mask=mask).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('return_attention', [True, False])
def test_fully_masked_row_gives_the_output_bias_and_finite_gradients(kernel, return_attention):
    layer = MetricAttention(8, num_heads=2, kernel=kernel)
    x = torch.randn(1, 4, 8, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out = layer(x, attn_mask=mask, return_attention=return_attention)
    out = out[0] if return_attention else out
    torch.testing.assert_close(out[0, 1], layer.proj.bias)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize('kernel', KERNELS)
def test_one_token_attends_to_itself(kernel):
    layer = MetricAttention(8, num_heads=2, kernel=kernel)
    x = torch.randn(3, 1, 8)
    out, attention = layer(x, return_attention=True)
    assert torch.equal(attention, torch.ones(3, 2, 1, 1))
    torch.testing.assert_close(out, layer.proj(layer.value(x)))
    torch.testing.assert_close(layer(x), out)


def test_gradients_equal_the_explicit_path():
    for kernel in KERNELS:
        layer = MetricAttention(8, num_heads=2, kernel=kernel, hidden_dims=None).double()
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        weight = torch.randn(2, 6, 8, dtype=torch.float64)
        grads = []
        for explicit in (True, False):
            out = layer(x, return_attention=explicit)
            out = out[0] if explicit else out
            grads.append(torch.autograd.grad((out * weight).sum(), list(layer.parameters())))
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)
        if kernel != 'dot':
            assert all(g.abs().max() > 0 for g in grads[0])


@pytest.mark.parametrize('shift', [0.0, 1000.0])
def test_a_common_shift_of_the_points_costs_no_precision(shift):
    points = torch.randn(1, 1, 20, 4, dtype=torch.float64)
    value = torch.randn(1, 1, 20, 4, dtype=torch.float64)
    moved = (points * 64).round() / 64 + shift
    distances = torch.cdist(moved, moved).square()
    expected = (-distances).softmax(-1) @ value
    out = distance_attention(moved.float(), value.float())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_points_and_not_the_scores(dtype):
    # Far from each other and from the origin: a squared norm of 600 has steps of 4 in bfloat16.
    points = (torch.randn(1, 2, 16, 32) * 0.2 + 4 * torch.randn(1, 2, 1, 32)).to(dtype)
    points[..., 8:, :] += 3
    value = torch.randn(1, 2, 16, 32).to(dtype)
    centred = points - points.mean(-2, keepdim=True)
    expected = (-torch.cdist(centred.double(), centred.double()).square()).softmax(-1)
    out = distance_attention(points, value)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected @ value.double(), rtol=4 * eps, atol=4 * eps)


def test_points_in_float32_with_values_in_half_precision():
    points = torch.randn(1, 2, 16, 32) * 0.2 + 4 * torch.randn(1, 2, 1, 32)
    points[..., 8:, :] += 3
    value = torch.randn(1, 2, 16, 32, dtype=torch.bfloat16)
    centred = (points - points.mean(-2, keepdim=True)).bfloat16().double()
    expected = (-torch.cdist(centred, centred).square()).softmax(-1) @ value.double()
    with torch.autocast('cpu', torch.bfloat16):
        out = distance_attention(points, value)
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)


def test_float16_norms_beyond_the_largest_float16():
    points = torch.zeros(1, 1, 2, 8, dtype=torch.float16)
    points[0, 0, 1] = 200.0
    value = torch.eye(2, 8, dtype=torch.float16)[None, None]
    torch.testing.assert_close(distance_attention(points, value), value)


def test_autocast_is_close_to_float32():
    for kernel in KERNELS:
        layer = MetricAttention(32, num_heads=2, kernel=kernel)
        x = torch.randn(2, 9, 32)
        with torch.autocast('cpu', torch.bfloat16):
            half = layer(x)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), layer(x), rtol=0.02, atol=0.02)


def test_dropout_keeps_the_mean_and_rests_in_evaluation():
    layer = MetricAttention(8, num_heads=1, attn_drop=0.5, proj_drop=0.0)
    x = 0.1 * torch.randn(1, 6, 8)
    expected = layer.eval()(x)
    assert torch.equal(layer(x), expected)
    layer.train()
    for explicit in (True, False):
        many = layer(x.expand(4000, 6, 8), return_attention=explicit)
        many = many[0] if explicit else many
        torch.testing.assert_close(many.mean(0, keepdim=True), expected, rtol=0, atol=0.03)
        assert many.std(0).max() > 0.05


def test_scale_multiplies_the_scores():
    plain = MetricAttention(8, num_heads=2)
    scaled = MetricAttention(8, num_heads=2, scale=0.25)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 5, 8)
    torch.testing.assert_close(scaled.scores(x), plain.scores(x) / 4)
    expected = (plain.scores(x) / 4).softmax(-1)
    torch.testing.assert_close(scaled(x, return_attention=True)[1], expected)
    torch.testing.assert_close(scaled(x), scaled(x, return_attention=True)[0])


def test_dot_equals_torch_multi_head_attention():
    layer = MetricAttention(12, num_heads=3, kernel='dot')
    oracle = nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        oracle.in_proj_weight.copy_(torch.cat([layer.query_key.weight, layer.value.weight]))
        oracle.in_proj_bias.copy_(torch.cat([layer.query_key.bias, layer.value.bias]))
        oracle.out_proj.load_state_dict(layer.proj.state_dict())
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), oracle(x, x, x)[0])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(kernel='cosine'), "kernel='cosine'"),
        (dict(num_heads=3), 'num_heads=3'),
        (dict(num_heads=0), 'num_heads=0'),
        (dict(hidden_dims=0), 'hidden_dims=0'),
        (dict(kernel='l2', hidden_dims=4), 'hidden_dims=4'),
        (dict(scale=0.0), 'scale=0.0'),
        (dict(scale=math.nan), 'scale=nan'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        MetricAttention(**{**dict(embed_dims=8, num_heads=2), **arguments})


def test_the_dot_product_has_no_map():
    with pytest.raises(ValueError, match='dot'):
        MetricAttention(8, 2, kernel='dot').features(torch.randn(1, 2, 8))
