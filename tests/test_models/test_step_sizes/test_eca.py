import pytest
import torch
from timm.layers import EcaModule

from mmstepnet.models.step_sizes import ECA


@pytest.mark.parametrize('channels', [32, 64, 256, 2048])
def test_equals_timm_on_the_same_weights(channels):
    torch.manual_seed(0)
    ours, theirs = ECA(channels), EcaModule(channels)
    theirs.conv.weight.data = ours.conv.weight.data
    x = torch.randn(2, channels, 3, 5)
    torch.testing.assert_close(x * ours(x, x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ('channels', 'kernel_size'), [(64, 3), (128, 5), (256, 5), (512, 5), (1024, 5), (2048, 7)]
)
def test_kernel_size_follows_the_channels(channels, kernel_size):
    assert ECA(channels).conv.weight.shape == (1, 1, kernel_size)


def test_given_kernel_size_is_used_and_channels_beyond_the_edge_count_as_zero():
    gate = ECA(4, kernel_size=3)
    with torch.no_grad():
        gate.conv.weight.copy_(torch.tensor([[[1.0, 10.0, 100.0]]]))
    residual = torch.tensor([0.001, 0.002, 0.003, 0.004]).view(1, 4, 1, 1).expand(1, 4, 2, 2)
    logits = torch.tensor([0.21, 0.321, 0.432, 0.043])
    torch.testing.assert_close(gate(residual, residual).flatten(), logits.sigmoid())


@pytest.mark.parametrize('kernel_size', [2, 0, -3, 3.0])
def test_kernel_size_must_be_odd(kernel_size):
    with pytest.raises(ValueError, match='kernel_size must be an odd positive int'):
        ECA(64, kernel_size=kernel_size)


def test_gamma_must_be_positive():
    with pytest.raises(ValueError, match='gamma must be positive, got 0'):
        ECA(64, gamma=0)
