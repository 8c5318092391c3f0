"""A classifier of attention layers that take the place of convolutions.

Cordonnier, Loukas, Jaggi: On the Relationship between Self-Attention and Convolutional Layers,
ICLR 2020, https://arxiv.org/abs/1911.03584.
"""

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmstepnet.models.layers.relative_attention import RelativeAttention2d
from mmstepnet.models.layers.residual_step import ResidualStep
from mmstepnet.registry import MODELS


class AttentionConvLayer(nn.Module):
    """One encoder layer: attention and MLP, each a residual step with layer norm behind the sum.

    Args:
        embed_dims: C.
        feedforward_channels: Width inside the MLP.
        num_heads: Heads.
        drop_rate: Dropout of both residual branches.
        attention: Further arguments of :class:`RelativeAttention2d`.

    Shape:
        - x: (N, H, W, C)
        - returns: (N, H, W, C)
    """

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        num_heads: int,
        drop_rate: float = 0.0,
        attention: dict | None = None,
    ):
        super().__init__()
        self.attention = RelativeAttention2d(embed_dims, embed_dims, num_heads, **(attention or {}))
        self.attention_proj = nn.Linear(embed_dims, embed_dims)
        self.attention_step = ResidualStep(activation=nn.LayerNorm(embed_dims))
        self.mlp = nn.Sequential(
            nn.Linear(embed_dims, feedforward_channels),
            nn.GELU(),
            nn.Linear(feedforward_channels, embed_dims),
        )
        self.mlp_step = ResidualStep(activation=nn.LayerNorm(embed_dims))
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = self.attention_step(x, self.drop(self.attention_proj(attended)))
        return self.mlp_step(x, self.drop(self.mlp(x)))


@MODELS.register_module()
class AttentionConvNet(BaseModule):
    """Relative attention in place of convolutions, for small pictures.

    Each ``patch_size`` x ``patch_size`` pixels become one (space to depth) and are projected to
    the width; then come the encoder layers and the mean over all pixels. With a linear layer for
    10 classes the paper's network (the defaults) has 12,086,844 parameters, with
    ``position='learned'`` 12,278,682 and with ``content=True`` on top 29,601,882.

    Args:
        depth: Encoder layers.
        embed_dims: Their width.
        feedforward_channels: Width inside their MLPs.
        num_heads: Attention heads.
        position: ``'quadratic'`` or ``'learned'``, see :class:`RelativeAttention2d`.
        content: Whether scores depend on the pixels' content too.
        precision: ``'isotropic'`` or ``'general'``, with ``position='quadratic'``.
        max_size: Largest height and width after space to depth, with ``position='learned'``.
        in_channels: Channels of the picture.
        patch_size: Side of the blocks of pixels that become one.
        drop_rate: Dropout of the residual branches.
        with_cp: Recompute each layer in the backward pass, to save memory.
        init_cfg: As for MMEngine modules; by default linear layers start at N(0, 0.02^2).

    Shape:
        - x: (N, in_channels, H, W), sides divisible by ``patch_size``
        - returns: a tuple of one tensor (N, embed_dims)

    Raises:
        ValueError: On a picture that ``patch_size`` does not divide.

    Example:
        >>> AttentionConvNet()(torch.rand(1, 3, 32, 32))[0].shape
        torch.Size([1, 400])
    """

    def __init__(
        self,
        depth: int = 6,
        embed_dims: int = 400,
        feedforward_channels: int = 512,
        num_heads: int = 9,
        position: str = 'quadratic',
        content: bool = False,
        precision: str = 'isotropic',
        max_size: int = 16,
        in_channels: int = 3,
        patch_size: int = 2,
        drop_rate: float = 0.1,
        with_cp: bool = False,
        init_cfg: dict | list | None = None,
    ):
        default = dict(type='Normal', layer='Linear', std=0.02)
        super().__init__(default if init_cfg is None else init_cfg)
        self.patch_size = patch_size
        self.with_cp = with_cp
        self.embed = nn.Linear(in_channels * patch_size**2, embed_dims)
        attention = dict(position=position, content=content, precision=precision, max_size=max_size)
        self.layers = nn.ModuleList(
            AttentionConvLayer(embed_dims, feedforward_channels, num_heads, drop_rate, attention)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if x.shape[-2] % self.patch_size or x.shape[-1] % self.patch_size:
            raise ValueError(
                f'pictures of {x.shape[-2]}x{x.shape[-1]} have sides that '
                f'patch_size={self.patch_size} does not divide'
            )
        x = F.pixel_unshuffle(x, self.patch_size)
        x = self.embed(x.permute(0, 2, 3, 1))
        for layer in self.layers:
            if self.with_cp and x.requires_grad:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return (x.mean((1, 2)),)

    @torch.no_grad()
    def prune_heads(
        self, max_condition: float = 1000.0, min_precision: float = 1e-5
    ) -> list[list[int]]:
        """Remove degenerate heads of every layer, see :meth:`RelativeAttention2d.prune_heads`.

        Returns:
            list[list[int]]: For each layer the heads that stay, numbered as they were.

        Raises:
            ValueError: With ``position='learned'``, or if a layer would lose all heads; then
                nothing has changed.
        """
        for layer in self.layers:
            layer.attention.sound_heads(max_condition, min_precision)
        kept = [
            layer.attention.prune_heads(max_condition, min_precision).tolist()
            for layer in self.layers
        ]
        print_log(f'heads kept by layer: {[len(heads) for heads in kept]}', logger='current')
        return kept
