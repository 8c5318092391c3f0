"""Convolutional block attention: a channel gate, then a spatial gate.

Woo, Park, Lee, Kweon: CBAM: Convolutional Block Attention Module, ECCV 2018,
https://arxiv.org/abs/1807.06521.
"""

import torch
from torch import Tensor, nn

from .base import StepSize, spatial_mean
from .eca import check_kernel_size
from .pooled_norm import PooledBatchNorm
from .squeeze_excitation import channel_mlp


class CBAM(StepSize):
    r"""Step size :math:`dt = dt_c \cdot dt_s`, a channel times a spatial gate (equations 1 to 3).

    :math:`dt_c = \sigma(\mathrm{MLP}(\mathrm{avg} f) + \mathrm{MLP}(\max f))` with one shared MLP,
    and :math:`dt_s = \sigma(\mathrm{BN}(\mathrm{conv}_{7\times7}[\max_c f', \mathrm{mean}_c f']))`
    with :math:`f' = f \cdot dt_c`. The batch norm has momentum 0.01, as its authors trained it.

    Args:
        in_channels: Channels C of the residual.
        reduction: r of the MLP, its layers meet in ``C // r`` channels.
        kernel_size: Of the spatial convolution, odd.
        bias: Whether the MLP's layers have biases.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, H, W)

    Raises:
        ValueError: ``reduction`` leaves no channel, ``kernel_size`` is even.
    """

    def __init__(
        self, in_channels: int, reduction: int = 16, kernel_size: int = 7, bias: bool = True
    ):
        super().__init__(in_channels)
        check_kernel_size(kernel_size)
        self.mlp = channel_mlp(in_channels, reduction, bias)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = PooledBatchNorm(1, sync=False, momentum=0.01)

    def gate(self, residual: Tensor) -> Tensor:
        average = spatial_mean(residual).to(residual.dtype)
        channel = (self.mlp(average) + self.mlp(residual.amax((2, 3)))).sigmoid()
        channel = channel.to(residual.dtype)[:, :, None, None]
        scaled = residual * channel
        descriptor = torch.stack((scaled.amax(1), scaled.mean(1)), 1)
        logit = self.conv(descriptor)
        spatial = self.norm(logit.reshape(-1, 1)).view_as(logit).sigmoid()
        return channel * spatial.to(residual.dtype)
