import math

import pytest
import torch
from scipy.fft import dctn

from mmstepnet.models import StepResNet
from mmstepnet.models.step_sizes import FCA
from mmstepnet.models.step_sizes.fca import cosine_basis

VERTICAL = (0, 0, 6, 0, 0, 1, 1, 4, 5, 1, 3, 0, 0, 0, 3, 2)
HORIZONTAL = (0, 1, 0, 5, 2, 0, 2, 0, 0, 6, 0, 4, 6, 3, 5, 2)


@pytest.mark.parametrize(('size', 'scale'), [(7, 1), (8, 1), (14, 2), (16, 2), (56, 8)])
def test_pooling_takes_the_orthonormal_dct_coefficients(size, scale):
    torch.manual_seed(0)
    picture = torch.randn(size, size, dtype=torch.float64)
    spectrum = dctn(picture.numpy(), type=2, norm='ortho')
    expected = [spectrum[u * scale, v * scale] for u, v in zip(VERTICAL, HORIZONTAL, strict=True)]
    ours = (cosine_basis(size).double() * picture).sum((1, 2))
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_equals_a_float64_reference():
    torch.manual_seed(0)
    gate = FCA(32, dct_size=7, reduction=8).double()
    gate.basis = gate.basis.double()
    residual = torch.randn(2, 32, 7, 7, dtype=torch.float64)
    frequency = torch.zeros(2, 32, dtype=torch.float64)
    for n in range(2):
        for c in range(32):
            u, v = VERTICAL[c // 2], HORIZONTAL[c // 2]
            total = 0.0
            for i in range(7):
                for j in range(7):
                    basis = math.cos(math.pi * u * (i + 0.5) / 7)
                    basis *= math.cos(math.pi * v * (j + 0.5) / 7)
                    total += residual[n, c, i, j].item() * basis
            norm_u, norm_v = (math.sqrt((1 if k == 0 else 2) / 7) for k in (u, v))
            frequency[n, c] = total * norm_u * norm_v
    first, second = gate.mlp[0], gate.mlp[2]
    hidden = (frequency @ first.weight.T + first.bias).clamp(min=0)
    expected = 1 / (1 + torch.exp(-(hidden @ second.weight.T + second.bias)))
    torch.testing.assert_close(
        gate(residual, residual), expected[:, :, None, None], rtol=0, atol=1e-6
    )


def test_other_sizes_are_average_pooled_to_the_training_map():
    torch.manual_seed(0)
    gate = FCA(16, dct_size=8)
    small = torch.randn(2, 16, 8, 8)
    large = small.repeat_interleave(3, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(gate(large, large), gate(small, small))


def test_default_size_is_the_training_map_but_at_least_seven():
    assert FCA(16, map_size=28).dct_size == 28
    assert FCA(16, map_size=4).dct_size == 7
    assert FCA(16, map_size=28, dct_size=14).dct_size == 14


@pytest.mark.parametrize('strides', [(1, 2, 2, 2), (1, 2, 2, 1)])
def test_a_resnet_takes_the_maps_of_224_pixels(strides):
    net = StepResNet(18, strides=strides, plugins=[dict(cfg=dict(type='mmstepnet.FCA'))])
    sizes = [stage[0].step.step_size.dct_size for stage in net.stages]
    assert sizes == [56, 28, 14, 14 // strides[3]]


def test_checkpoints_fit_every_size():
    FCA(16, dct_size=14).load_state_dict(FCA(16, dct_size=7).state_dict())


def test_bad_arguments():
    with pytest.raises(ValueError, match='in_channels must be a multiple of 16'):
        FCA(24)
    with pytest.raises(ValueError, match='dct_size must be an int of at least 7, got 6'):
        FCA(16, dct_size=6)
