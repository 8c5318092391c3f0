"""Switchable excitation: three excitations, mixed by weights that the input decides.

Zhong, Wen, Qin: Switchable Self-attention Module, 2022, https://arxiv.org/abs/2209.05680.
"""

import torch
from torch import Tensor, nn

from .base import StepSize
from .eca import channel_conv
from .squeeze_excitation import channel_mlp


class SEM(StepSize):
    r"""Step size :math:`dt = \prod_{k=1}^{3} \sigma(s_k(\bar f)\, e_k(\bar f))`.

    The excitations :math:`e_k` of the mean vector are squeeze-and-excitation's MLP, ECA's
    convolution along the channels and instance enhancement (``scale * mean + shift``, 0 and -1 at
    the start); the switch :math:`s = \sigma(\mathrm{linear}(\bar f))` gives one weight in (0, 1) to
    each.

    Args:
        in_channels: Channels C of the residual.
        reduction: r of the MLP, its layers meet in ``C // r`` channels.
        kernel_size: Of the convolution, odd; None takes it from C as :class:`ECA` does.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)

    Raises:
        ValueError: ``reduction`` leaves no channel, ``kernel_size`` is even.
    """

    means = (False, True)

    def __init__(self, in_channels: int, reduction: int = 16, kernel_size: int | None = None):
        super().__init__(in_channels)
        self.mlp = channel_mlp(in_channels, reduction, bias=True)
        self.conv = channel_conv(in_channels, kernel_size, gamma=2, b=1)
        self.scale = nn.Parameter(torch.zeros(in_channels))
        self.shift = nn.Parameter(torch.full((in_channels,), -1.0))
        self.switch = nn.Linear(in_channels, 3)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.scale)
        nn.init.constant_(self.shift, -1.0)

    def gate_of_means(self, identity_mean: None, residual_mean: Tensor) -> Tensor:
        pooled = residual_mean.to(self.switch.weight.dtype)
        excitations = torch.stack(
            (
                self.mlp(pooled),
                self.conv(pooled[:, None]).squeeze(1),
                torch.addcmul(self.shift, pooled, self.scale),
            ),
            1,
        )
        switch = self.switch(pooled).sigmoid()[:, :, None]
        # Written out: the backward pass of prod() looks for zeros on the host.
        a, b, c = (switch * excitations).sigmoid().unbind(1)
        return a * b * c
