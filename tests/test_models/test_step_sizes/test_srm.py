import math

import torch

from mmstepnet.models.step_sizes import SRM


def _reference(residual, weight, gain, offset, eps=1e-5):
    """Style pooling, style integration and batch norm, number by number."""
    n, c = residual.shape[:2]
    gate = torch.zeros(n, c, dtype=torch.float64)
    for j in range(c):
        mixed = []
        for i in range(n):
            values = residual[i, j].flatten().tolist()
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
            mixed.append(weight[j, 0] * mean + weight[j, 1] * math.sqrt(variance + 1e-5))
        centre = sum(mixed) / n
        spread = math.sqrt(sum((m - centre) ** 2 for m in mixed) / n + eps)
        for i in range(n):
            logit = (mixed[i] - centre) / spread * gain[j] + offset[j]
            gate[i, j] = 1 / (1 + math.exp(-logit))
    return gate[:, :, None, None]


def test_equals_a_float64_reference():
    torch.manual_seed(0)
    gate = SRM(5).double()
    for param in gate.parameters():
        torch.nn.init.normal_(param)
    residual = torch.randn(4, 5, 3, 6, dtype=torch.float64)
    expected = _reference(residual, gate.weight, gate.norm.weight, gate.norm.bias)
    torch.testing.assert_close(gate(residual, residual), expected, rtol=1e-12, atol=1e-12)


def test_starts_at_one_half():
    dt = SRM(6)(torch.zeros(3, 6, 4, 4), torch.randn(3, 6, 4, 4))
    torch.testing.assert_close(dt, torch.full((3, 6, 1, 1), 0.5))


def test_one_position_has_no_spread():
    gate = SRM(1).eval()
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([[0.0, 1.0]]))
    dt = gate(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 7.0))
    logit = math.sqrt(1e-5) / math.sqrt(1 + 1e-5)
    torch.testing.assert_close(dt.item(), 1 / (1 + math.exp(-logit)), rtol=1e-6, atol=0)
