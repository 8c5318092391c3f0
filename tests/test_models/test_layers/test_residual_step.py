import pytest
import torch
from torch import nn

from mmstepnet.models import ResidualStep
from mmstepnet.models.step_sizes import SqueezeExcitation
from mmstepnet.models.step_sizes.base import StepSize


class ConstantStep(nn.Module):
    def forward(self, identity, residual):
        return torch.full((1, 2, 1, 1), 0.25)


def test_plain_step_is_the_sum():
    x, f = torch.randn(2, 3, 2, 4, 4)
    assert torch.equal(ResidualStep()(x, f), x + f)


def test_step_size_scales_the_residual_and_the_activation_comes_last():
    x, f = torch.randn(2, 3, 2, 4, 4)
    step = ResidualStep(ConstantStep(), nn.ReLU(inplace=True))
    assert torch.allclose(step(x, f), (x + 0.25 * f).clamp(min=0), rtol=0, atol=1e-6)


def test_recorder_hears_each_pass_before_the_sum():
    heard = []
    x, f = torch.randn(2, 3, 2, 4, 4)
    plain, scaled = ResidualStep(activation=nn.ReLU(inplace=True)), ResidualStep(ConstantStep())
    for step in (plain, scaled):
        step.recorder = lambda *args: heard.append(
            [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        )
        step(x.clone(), f.clone())
    assert [entry[0] for entry in heard] == [plain, scaled]
    assert all(torch.equal(entry[1], x) and torch.equal(entry[2], f) for entry in heard)
    assert heard[0][3] is None
    assert heard[1][3].unique().tolist() == [0.25]


class HalvedForward(SqueezeExcitation):
    def forward(self, identity, residual=None):
        return 0.5 * super().forward(identity, residual)


class HalvedGate(SqueezeExcitation):
    def gate(self, residual):
        return 0.5 * super().gate(residual)


class HalvedMeans(HalvedForward):
    def gate_of_means(self, identity_mean, residual_mean):
        return 0.5 * super().gate_of_means(identity_mean, residual_mean)

    forward = StepSize.forward


def halved_instance(channels, **kwargs):
    step_size = SqueezeExcitation(channels, **kwargs)
    forward = step_size.forward
    step_size.forward = lambda *states: 0.5 * forward(*states)
    return step_size


@pytest.mark.parametrize('kind', [HalvedForward, HalvedGate, HalvedMeans, halved_instance])
def test_what_a_subclass_overrides_counts_in_training_too(kind):
    plain, halved = SqueezeExcitation(8, reduction=2), kind(8, reduction=2)
    halved.load_state_dict(plain.state_dict())
    x, f = torch.randn(2, 2, 8, 4, 4)
    want = x + 0.5 * (ResidualStep(plain)(x, f) - x)
    with torch.no_grad():
        torch.testing.assert_close(ResidualStep(halved)(x, f), want)
    torch.testing.assert_close(ResidualStep(halved)(x, f), want)
    torch.testing.assert_close(halved(f), 0.5 * plain(f))


def test_a_batch_without_a_sample():
    step = ResidualStep(SqueezeExcitation(8, reduction=2))
    x = torch.zeros(0, 8, 4, 4, requires_grad=True)
    out = step(x, torch.zeros(0, 8, 4, 4))
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
