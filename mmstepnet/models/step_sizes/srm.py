"""Style-based recalibration: the step size from each channel's mean and spread.

Lee, Kim, Nam: SRM: A Style-based Recalibration Module for Convolutional Neural Networks, ICCV 2019,
https://arxiv.org/abs/1903.10829.
"""

import torch
from torch import Tensor, nn

from .base import StepSize
from .pooled_norm import PooledBatchNorm


class SRM(StepSize):
    r"""Step size :math:`dt = \sigma(\mathrm{BN}(w_1 \mu + w_2 s))` per channel (section 3).

    :math:`\mu` is a channel's spatial mean and :math:`s = \sqrt{\mathrm{var} + \epsilon}` its
    spread, with the unbiased variance over the positions (0 on a map of one position, where there
    is no spread to measure). The weights begin at 0, and so every ``dt`` at 1/2. The authors train
    these parameters without weight decay; in a config: ``custom_keys={'.step.':
    dict(decay_mult=0.)}``.

    Args:
        in_channels: Channels C of the residual.
        sync: In distributed training take the batch norm's statistics over all ranks.
        eps: Added to the variance.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)
    """

    def __init__(self, in_channels: int, sync: bool = True, eps: float = 1e-5):
        super().__init__(in_channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(in_channels, 2))
        self.norm = PooledBatchNorm(in_channels, sync=sync)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.norm.reset_parameters()

    def gate(self, residual: Tensor) -> Tensor:
        x = residual.flatten(2)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(x, 2, correction=0)
        # The unbiased variance, 0 on one position; in tensors, which a graph keeps for any size.
        count = x.new_ones(x.shape[2]).sum()
        spread = (variance * (count / (count - 1).clamp(min=1)) + self.eps).sqrt()
        logit = mean * self.weight[:, 0] + spread * self.weight[:, 1]
        logit = self.norm(logit.to(self.weight.dtype))
        return logit.sigmoid().to(residual.dtype)[:, :, None, None]
