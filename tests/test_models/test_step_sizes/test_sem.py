import math

import torch

from mmstepnet.models.step_sizes import SEM


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


def _reference(means, gate):
    """The gate of one sample from its channel means, number by number."""
    channels = len(means)

    def linear(layer, x):
        pairs = zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)
        return [sum(w * v for w, v in zip(row, x, strict=True)) + bias for row, bias in pairs]

    switch = [_sigmoid(s) for s in linear(gate.switch, means)]
    hidden = [max(0.0, h) for h in linear(gate.mlp[0], means)]
    excitation = linear(gate.mlp[2], hidden)
    kernel = gate.conv.weight.flatten().tolist()
    half = len(kernel) // 2
    padded = [0.0] * half + means + [0.0] * half
    local = [sum(k * padded[c + i] for i, k in enumerate(kernel)) for c in range(channels)]
    enhanced = [
        s * m + b for s, m, b in zip(gate.scale.tolist(), means, gate.shift.tolist(), strict=True)
    ]
    return [
        _sigmoid(switch[0] * a) * _sigmoid(switch[1] * b) * _sigmoid(switch[2] * c)
        for a, b, c in zip(excitation, local, enhanced, strict=True)
    ]


def test_equals_a_float64_reference():
    torch.manual_seed(0)
    gate = SEM(16, reduction=4).double()
    torch.nn.init.normal_(gate.scale)
    torch.nn.init.normal_(gate.shift)
    residual = torch.randn(3, 16, 4, 5, dtype=torch.float64) * 3
    expected = [_reference(sample.mean((1, 2)).tolist(), gate) for sample in residual]
    expected = torch.tensor(expected, dtype=torch.float64)[:, :, None, None]
    torch.testing.assert_close(gate(residual, residual), expected, rtol=1e-12, atol=1e-12)
