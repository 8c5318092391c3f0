"""Attention layers and nothing else: points that exchange what they know.

Ruan, Zhang: Towards understanding how attention mechanism works in deep learning, 2024,
https://arxiv.org/abs/2412.18288.
"""

from mmengine.model import BaseModule
from torch import Tensor, nn

from mmstepnet.models.layers.metric_attention import MetricAttention
from mmstepnet.models.layers.residual_step import ResidualStep
from mmstepnet.registry import MODELS


@MODELS.register_module()
class InformationPropagationNet(BaseModule):
    r"""A linear layer, attention layers, a linear layer; the points of a set are the tokens.

    Each attention layer is a step :math:`h_{t+1} = h_t + S(h_t) V h_t`, without norm and MLP, so
    that whatever is not linear comes from the similarity S. A point's class depends on the points
    that it is seen with.

    Args:
        in_dims: Coordinates of a point.
        out_dims: Numbers that come out for a point, the classes for instance.
        embed_dims: Width in between.
        depth: Attention layers.
        num_heads: Heads of each.
        kernel: ``'metric'``, ``'l2'`` or ``'dot'``, see :class:`MetricAttention`.
        residual: Keep the identity in each layer; without it :math:`h_{t+1} = S(h_t) V h_t`.
        attention: Further arguments of :class:`MetricAttention`.
        init_cfg: As for MMEngine modules.

    Shape:
        - x: (N, L, in_dims), N sets of L points
        - returns: (N, L, out_dims)
    """

    def __init__(
        self,
        in_dims: int = 2,
        out_dims: int = 2,
        embed_dims: int = 16,
        depth: int = 2,
        num_heads: int = 1,
        kernel: str = 'metric',
        residual: bool = True,
        attention: dict | None = None,
        init_cfg: dict | list | None = None,
    ):
        super().__init__(init_cfg)
        self.embed = nn.Linear(in_dims, embed_dims)
        self.layers = nn.ModuleList(
            MetricAttention(embed_dims, num_heads, kernel=kernel, **(attention or {}))
            for _ in range(depth)
        )
        self.steps = nn.ModuleList(ResidualStep() for _ in range(depth)) if residual else None
        self.head = nn.Linear(embed_dims, out_dims)

    def states(self, x: Tensor) -> list[Tensor]:
        """The points after the first linear layer and after each attention layer.

        Returns:
            list[Tensor]: depth + 1 tensors (N, L, embed_dims).
        """
        states = [self.embed(x)]
        for t, layer in enumerate(self.layers):
            h = states[-1]
            states.append(layer(h) if self.steps is None else self.steps[t](h, layer(h)))
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.states(x)[-1])
