"""Efficient channel attention: a short convolution along the channels.

Wang, Wu, Zhu, Li, Zuo, Hu: ECA-Net, CVPR 2020, https://arxiv.org/abs/1910.03151.
"""

import math

from torch import Tensor, nn

from .base import StepSize, check_channels


def check_kernel_size(kernel_size: int) -> int:
    """Return ``kernel_size`` if it is an odd positive int, raise ``ValueError`` otherwise."""
    is_int = isinstance(kernel_size, int) and not isinstance(kernel_size, bool)
    if not is_int or kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f'kernel_size must be an odd positive int, got {kernel_size!r}')
    return kernel_size


def channel_conv(in_channels: int, kernel_size: int | None, gamma: float, b: float) -> nn.Conv1d:
    """The convolution over neighbouring channels, (N, 1, C) -> (N, 1, C), zero padded.

    Without ``kernel_size`` it is the odd number that section 3.3 of the paper takes for C channels:
    ``t = floor(|log2(C) + b| / gamma)``, and ``t + 1`` where t is even.

    Raises:
        ValueError: ``kernel_size`` is even or below 1, or ``gamma`` is not positive.
    """
    check_channels(in_channels)
    if kernel_size is None:
        if gamma <= 0:
            raise ValueError(f'gamma must be positive, got {gamma!r}')
        kernel_size = int(abs(math.log2(in_channels) + b) / gamma)
        kernel_size += 1 - kernel_size % 2
    return nn.Conv1d(1, 1, check_kernel_size(kernel_size), padding=kernel_size // 2, bias=False)


class ECA(StepSize):
    r"""Step size :math:`dt = \sigma(\mathrm{conv1d}_k(\bar f))` along the channels (section 3.2).

    Args:
        in_channels: Channels C of the residual.
        kernel_size: k, odd; None takes it from C: 3 for 64 channels, 5 for 128 to 512, 7 for 2048.
        gamma: Divides in the rule for k.
        b: Added in the rule for k.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)

    Raises:
        ValueError: An even ``kernel_size``, a ``gamma`` that is not positive.
    """

    means = (False, True)

    def __init__(
        self, in_channels: int, kernel_size: int | None = None, gamma: float = 2, b: float = 1
    ):
        super().__init__(in_channels)
        self.conv = channel_conv(in_channels, kernel_size, gamma, b)

    def gate_of_means(self, identity_mean: None, residual_mean: Tensor) -> Tensor:
        pooled = residual_mean.to(self.conv.weight.dtype)
        return self.conv(pooled[:, None]).squeeze(1).sigmoid()
