"""Spatial group-wise enhancement: a spatial step size for each group of channels.

Li, Hu, Yang: Spatial Group-wise Enhance, 2019, https://arxiv.org/abs/1905.09646.
"""

import torch
from torch import Tensor, nn

from .base import StepSize


class SGE(StepSize):
    r"""Step size :math:`dt = \sigma(\gamma\,\hat c + \beta)`, one map for each group.

    :math:`c_i = \bar f \cdot f_i` is the similarity of position i to the group's mean vector;
    :math:`\hat c = (c - \mu) / (\sigma + \epsilon)` with mean and (population) standard deviation
    over the positions. At the start :math:`\gamma = 0`, :math:`\beta = 1`, so every ``dt`` is
    ``sigmoid(1) = 0.731``.

    Args:
        in_channels: Channels C of the residual, a multiple of ``groups``.
        groups: Number of groups.
        eps: Added to the standard deviation.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, H, W), equal within a group

    Raises:
        ValueError: ``groups`` does not divide ``in_channels``.
    """

    def __init__(self, in_channels: int, groups: int = 64, eps: float = 1e-5):
        super().__init__(in_channels)
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
            raise ValueError(f'groups must be a positive int, got {groups!r}')
        if in_channels % groups:
            raise ValueError(
                f'groups={groups} does not divide in_channels={in_channels}; '
                'allowed are the divisors of in_channels'
            )
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(groups))
        self.bias = nn.Parameter(torch.empty(groups))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.bias)

    def gate(self, residual: Tensor) -> Tensor:
        x = residual.unflatten(1, (self.groups, -1)).flatten(3)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        similarity = (x * x.mean(3, keepdim=True)).sum(2)
        centred = similarity - similarity.mean(2, keepdim=True)
        # A norm instead of a standard deviation: on a constant map its gradient is 0 and not NaN.
        deviation = torch.linalg.vector_norm(centred, dim=2, keepdim=True) / x.shape[3] ** 0.5
        normalised = centred / (deviation + self.eps)
        gate = (normalised * self.weight[:, None] + self.bias[:, None]).sigmoid()
        gate = gate.to(residual.dtype)[:, :, None].expand(-1, -1, x.shape[2], -1)
        return gate.reshape(residual.shape)

    def extra_repr(self) -> str:
        return f'{self.in_channels}, groups={self.groups}'
