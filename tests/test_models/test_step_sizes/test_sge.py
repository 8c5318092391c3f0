import math

import pytest
import torch

from mmstepnet.models.step_sizes import SGE


def _reference(residual, groups, weight, bias, eps=1e-5):
    """Similarity to the group's mean vector, standardised over positions, number by number."""
    n, c, h, w = residual.shape
    size = c // groups
    gate = torch.zeros_like(residual)
    for i in range(n):
        for g in range(groups):
            group = residual[i, g * size : (g + 1) * size].reshape(size, -1)
            mean_vector = [row.sum().item() / (h * w) for row in group]
            similarity = [
                sum(mean_vector[k] * group[k, p].item() for k in range(size)) for p in range(h * w)
            ]
            mu = sum(similarity) / (h * w)
            sigma = math.sqrt(sum((s - mu) ** 2 for s in similarity) / (h * w))
            for p, s in enumerate(similarity):
                logit = (s - mu) / (sigma + eps) * weight[g].item() + bias[g].item()
                gate[i, g * size : (g + 1) * size, p // w, p % w] = 1 / (1 + math.exp(-logit))
    return gate


def test_equals_a_float64_reference():
    torch.manual_seed(0)
    gate = SGE(12, groups=4).double()
    for param in gate.parameters():
        torch.nn.init.normal_(param)
    residual = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    expected = _reference(residual, 4, gate.weight, gate.bias)
    torch.testing.assert_close(gate(residual, residual), expected, rtol=1e-12, atol=1e-12)


def test_starts_at_sigmoid_one():
    dt = SGE(64)(torch.zeros(2, 64, 3, 3), torch.randn(2, 64, 3, 3))
    torch.testing.assert_close(dt, torch.full((2, 64, 3, 3), 0.7310586))


def test_gradient_is_finite_on_a_constant_map():
    gate = SGE(64)
    torch.nn.init.ones_(gate.weight)
    residual = torch.ones(1, 64, 4, 4, requires_grad=True)
    gate(residual, residual).sum().backward()
    assert residual.grad.isfinite().all()


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match='groups=64 does not divide in_channels=96'):
        SGE(96)
    with pytest.raises(ValueError, match='groups must be a positive int, got 0'):
        SGE(96, groups=0)
