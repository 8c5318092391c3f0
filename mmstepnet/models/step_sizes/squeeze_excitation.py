"""Squeeze-and-excitation: the step size from the residual's channel means.

Hu, Shen, Sun: Squeeze-and-Excitation Networks, CVPR 2018, https://arxiv.org/abs/1709.01507.
"""

from torch import Tensor, nn

from .base import StepSize, check_channels


def channel_mlp(
    in_channels: int,
    reduction: int,
    bias: bool,
    inputs_per_channel: int = 1,
    outputs_per_channel: int = 1,
) -> nn.Sequential:
    """``W2 relu(W1 x)`` on channel vectors, (N, inputs * C) -> (N, outputs * C).

    The layers meet in ``C // reduction`` channels.

    Raises:
        ValueError: ``reduction`` is no positive int, or leaves no channel between the layers.
    """
    check_channels(in_channels)
    if isinstance(reduction, bool) or not isinstance(reduction, int) or reduction < 1:
        raise ValueError(f'reduction must be a positive int, got {reduction!r}')
    hidden = in_channels // reduction
    if hidden < 1:
        raise ValueError(
            f'reduction={reduction} leaves no channel of in_channels={in_channels}; '
            f'at most {in_channels} is allowed'
        )
    return nn.Sequential(
        nn.Linear(in_channels * inputs_per_channel, hidden, bias=bias),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, in_channels * outputs_per_channel, bias=bias),
    )


class SqueezeExcitation(StepSize):
    r"""Step size :math:`dt = \sigma(W_2\,\mathrm{relu}(W_1 \bar f))` (equation 3 of the paper).

    Args:
        in_channels: Channels C of the residual.
        reduction: r, the layers meet in ``C // r`` channels.
        bias: Whether the two layers have biases.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)

    Raises:
        ValueError: ``reduction`` leaves no channel.
    """

    means = (False, True)

    def __init__(self, in_channels: int, reduction: int = 16, bias: bool = True):
        super().__init__(in_channels)
        self.mlp = channel_mlp(in_channels, reduction, bias)

    def gate_of_means(self, identity_mean: None, residual_mean: Tensor) -> Tensor:
        return self.mlp(residual_mean.to(self.mlp[0].weight.dtype)).sigmoid()
