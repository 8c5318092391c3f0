import math

import torch

from mmstepnet.models.step_sizes import IE


def test_hand_computed_value():
    gate = IE(2)
    with torch.no_grad():
        gate.scale.copy_(torch.tensor([2.0, -1.0]))
        gate.shift.copy_(torch.tensor([0.5, 0.0]))
    residual = torch.tensor([[1.0, 2.0], [3.0, -1.0]])[None, :, None]
    # Means 1.5 and 1: logits 3.5 and -1.
    expected = [1 / (1 + math.exp(-3.5)), 1 / (1 + math.exp(1))]
    torch.testing.assert_close(gate(residual, residual).flatten(), torch.tensor(expected))


def test_starts_at_sigmoid_minus_one():
    dt = IE(3)(torch.zeros(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    torch.testing.assert_close(dt, torch.full((2, 3, 1, 1), 0.26894143))
