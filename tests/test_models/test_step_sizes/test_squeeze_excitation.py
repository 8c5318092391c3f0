import pytest
import torch
from timm.layers import SEModule

from mmstepnet.models.step_sizes import SqueezeExcitation


@pytest.mark.parametrize('bias', [True, False])
def test_equals_timm_on_the_same_weights(bias):
    torch.manual_seed(0)
    ours = SqueezeExcitation(32, reduction=8, bias=bias)
    theirs = SEModule(32, rd_channels=4, bias=bias)
    for mine, conv in ((ours.mlp[0], theirs.fc1), (ours.mlp[2], theirs.fc2)):
        conv.weight.data = mine.weight.data[:, :, None, None]
        if bias:
            conv.bias.data = mine.bias.data
    x = torch.randn(3, 32, 7, 5)
    torch.testing.assert_close(x * ours(x, x), theirs(x), rtol=1e-6, atol=1e-6)


def test_hand_computed_value():
    gate = SqueezeExcitation(2, reduction=2)
    with torch.no_grad():
        gate.mlp[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
        gate.mlp[0].bias.fill_(0.5)
        gate.mlp[2].weight.copy_(torch.tensor([[2.0], [-3.0]]))
        gate.mlp[2].bias.copy_(torch.tensor([0.0, 1.0]))
    # Means 2 and 1: hidden relu(2 - 1 + 0.5) = 1.5, logits 3 and -3.5.
    residual = torch.stack((torch.full((2, 2), 2.0), torch.tensor([[0.0, 2.0], [1.0, 1.0]])))[None]
    expected = torch.tensor([3.0, -3.5]).sigmoid().view(1, 2, 1, 1)
    torch.testing.assert_close(gate(torch.zeros_like(residual), residual), expected)


@pytest.mark.parametrize('reduction', [9, 0, -1, 2.0, True])
def test_reduction_that_leaves_no_channel_or_is_no_positive_int(reduction):
    with pytest.raises(ValueError, match='reduction'):
        SqueezeExcitation(8, reduction=reduction)


def test_in_channels_must_be_positive():
    with pytest.raises(ValueError, match='in_channels must be a positive int, got 0'):
        SqueezeExcitation(0)
