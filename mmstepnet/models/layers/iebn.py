"""Instance enhancement batch normalisation: batch norm whose scale each sample adjusts.

Liang, Huang, Liang, Yang: Instance Enhancement Batch Normalization: An Adaptive Regulator of Batch
Noise, AAAI 2020, https://arxiv.org/abs/1908.04008.
"""

import torch
from torch import Tensor, nn

from mmstepnet.models.step_sizes.ie import IE
from mmstepnet.registry import MODELS


@MODELS.register_module()
class IEBN(nn.Module):
    r"""Batch norm with an instance gate on its scale:
    :math:`y = \gamma \cdot \sigma(w \bar x + b) \cdot \hat x + \beta`.

    :math:`\bar x` is the spatial mean of the input itself, :math:`\hat x` the batch-normalised
    input. Per channel ``w = 0`` and ``b = -1`` at the start. Used as
    ``norm_cfg=dict(type='mmstepnet.IEBN')``; the backbones of this package keep plain batch norm in
    their shortcuts then.

    The statistics are those of an inner batch norm, so that a conversion to synchronised batch norm
    reaches them and leaves the gate in place.

    Args:
        num_features: C.
        eps: Added to the variance.
        momentum: Of the running statistics.

    Shape:
        - x: (N, C, H, W)
        - returns: (N, C, H, W)
    """

    _abbr_ = 'bn'

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.norm = nn.BatchNorm2d(num_features, eps=eps, momentum=momentum, affine=False)
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.gate = IE(num_features)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.gate.gate(x) * self.weight[:, None, None]
        normed = self.norm(x)
        # All in the map's precision: autocast would take it to float32.
        bias = self.bias.to(normed.dtype)[:, None, None]
        return torch.addcmul(bias, normed, scale.to(normed.dtype))


def plain_norm_cfg(norm_cfg: dict) -> dict:
    """``norm_cfg`` with batch norm in place of :class:`IEBN`, anything else as it is."""
    is_iebn = norm_cfg['type'] in (IEBN, 'IEBN', 'mmstepnet.IEBN')
    return dict(norm_cfg, type='BN') if is_iebn else norm_cfg
