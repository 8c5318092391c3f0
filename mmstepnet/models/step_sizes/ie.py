"""Instance enhancement: each channel's own mean decides its step size.

The gate of instance enhancement batch normalisation (Liang, Huang, Liang, Yang, AAAI 2020,
https://arxiv.org/abs/1908.04008), used on the residual.
"""

import torch
from torch import Tensor, nn

from .base import StepSize


class IE(StepSize):
    r"""Step size :math:`dt = \sigma(w \bar f + b)` per channel.

    At the start ``w = 0`` and ``b = -1``, so every ``dt`` is ``sigmoid(-1) = 0.269``.

    Args:
        in_channels: Channels C of the residual.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)
    """

    means = (False, True)

    def __init__(self, in_channels: int):
        super().__init__(in_channels)
        self.scale = nn.Parameter(torch.empty(in_channels))
        self.shift = nn.Parameter(torch.empty(in_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        nn.init.constant_(self.shift, -1.0)

    def gate_of_means(self, identity_mean: None, residual_mean: Tensor) -> Tensor:
        return torch.addcmul(self.shift, residual_mean, self.scale).sigmoid()

    def extra_repr(self) -> str:
        return f'{self.in_channels}'
