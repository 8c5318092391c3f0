import torch
from torch import nn

from mmstepnet.models import ResidualStep


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
