import pytest
import torch
from timm.layers.cbam import CbamModule

from mmstepnet.models.step_sizes import CBAM


@pytest.mark.parametrize('training', [True, False])
def test_equals_timm_on_the_same_weights(training):
    torch.manual_seed(0)
    ours, theirs = CBAM(32, reduction=8), CbamModule(32, rd_channels=4, mlp_bias=True)
    with torch.no_grad():
        for mine, conv in ((ours.mlp[0], theirs.channel.fc1), (ours.mlp[2], theirs.channel.fc2)):
            conv.weight.copy_(mine.weight[:, :, None, None])
            conv.bias.copy_(mine.bias)
        # The paper's order is maximum, mean; timm's is mean, maximum.
        theirs.spatial.conv.conv.weight.copy_(ours.conv.weight.flip(1))
        for norm in (ours.norm, theirs.spatial.conv.bn):
            norm.weight.fill_(1.5)
            norm.bias.fill_(0.25)
            norm.running_mean.fill_(0.1)
            norm.running_var.fill_(0.3)
    ours.train(training)
    theirs.train(training)
    x = torch.randn(3, 32, 9, 8)
    torch.testing.assert_close(x * ours(x, x), theirs(x), rtol=1e-6, atol=1e-6)


def test_running_statistics_follow_momentum_001():
    gate = CBAM(16)
    with torch.no_grad():
        gate.conv.weight.zero_()
    gate(torch.zeros(2, 16, 4, 4), torch.randn(2, 16, 4, 4))
    torch.testing.assert_close(gate.norm.running_var, torch.tensor([0.99]))


def test_kernel_size_must_be_odd():
    with pytest.raises(ValueError, match='kernel_size must be an odd positive int, got 4'):
        CBAM(64, kernel_size=4)
