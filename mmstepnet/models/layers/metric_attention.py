"""Self-attention whose scores are distances under a learned map, and its relatives.

Ruan, Zhang: Towards understanding how attention mechanism works in deep learning, 2024,
https://arxiv.org/abs/2412.18288.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmstepnet.registry import MODELS

KERNELS = ('metric', 'l2', 'dot')


def distance_attention(
    features: Tensor,
    value: Tensor,
    scale: float = 1.0,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    r"""Attention with the weights :math:`\mathrm{softmax}_j(-s \|f_i - f_j\|^2)`.

    :math:`-\|f_i - f_j\|^2 = 2 f_i \cdot f_j - \|f_j\|^2 - \|f_i\|^2`, and a softmax over j does
    not see :math:`\|f_i\|^2`. What is left is a dot product of ``(2 f_i, 1)`` and
    ``(f_j, -|f_j|^2)``, so that any fused kernel of ``scaled_dot_product_attention`` takes it
    without a mask. The squared norm is handed over as a coarse and a fine part, which keeps half
    precision from rounding it: scores are as exact as the kernel's float32 accumulation.

    Args:
        features: (N, heads, L, D), the points between which distances are taken.
        value: (N, heads, L, D), whose precision the result has.
        scale: s, positive.
        attn_mask: As ``scaled_dot_product_attention`` takes it: boolean (True takes part) or
            additive, broadcastable to (N, heads, L, L). A query without any key gets 0.
        dropout_p: Probability that a weight is dropped.

    Returns:
        Tensor: (N, heads, L, D).
    """
    # Distances don't change when all points move; near the origin their rounding is smallest. No
    # gradient is lost, since it is 0 in this direction.
    features = (features - features.detach().mean(-2, keepdim=True)).to(value.dtype)
    wide = torch.promote_types(features.dtype, torch.float32)
    squares = features.to(wide).square().sum(-1, keepdim=True)
    # The fine part has the whole gradient: that of the coarse one would be as large as its unit.
    coarse = (squares.detach() / _COARSE_UNIT).to(features.dtype)
    fine = (squares - coarse.to(wide) * _COARSE_UNIT).to(features.dtype)
    # Fused kernels want one width for all three, and on GPUs a multiple of 8.
    width = features.shape[-1] + 2
    padding = -width % 8
    zeros = features.new_zeros(()).expand(*squares.shape[:-1], padding)
    unit, one = (torch.full_like(squares, n, dtype=features.dtype) for n in (_COARSE_UNIT, 1))
    query = torch.cat([2 * features, unit, one, zeros], dim=-1)
    key = torch.cat([features, -coarse, -fine, zeros], dim=-1)
    out = F.scaled_dot_product_attention(
        query,
        key,
        F.pad(value, (0, padding + 2)),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        scale=scale,
    )
    return out[..., : value.shape[-1]]


# The coarse part counts in these units, so that norms beyond float16's largest number still fit.
_COARSE_UNIT = 256


@MODELS.register_module()
class MetricAttention(nn.Module):
    r"""Multi-head self-attention by a learned pseudo-metric, by L2 distance or by dot product.

    Each head has the weights :math:`S_{ij} = \mathrm{softmax}_j(s \cdot \mathrm{score}_{ij})`:

    - ``'metric'``: :math:`-\|F(h_i) - F(h_j)\|^2` with :math:`F(h) = h + W_2 \tanh(W_1 h + b_1)`,
      whose output the heads split. F need not be injective: a pseudo-metric. A bias behind
      :math:`W_2`, as the paper writes it, cancels in every difference and is left out.
    - ``'l2'``: the same with linear F, without bias for the same reason.
    - ``'dot'``: :math:`q_i \cdot k_j`, the usual one.

    Values, heads and output projection are those of a vision transformer.

    Args:
        embed_dims: C.
        num_heads: Heads, a divisor of C.
        hidden_dims: Width inside F for ``kernel='metric'``; C by default.
        kernel: ``'metric'``, ``'l2'`` or ``'dot'``.
        scale: s; by default 1 (no temperature) for the distances and 1 / sqrt(C / num_heads) for
            the dot product.
        attn_drop: Dropout of the weights.
        proj_drop: Dropout behind the output projection.
        bias: Biases of query, key and value.
        proj_bias: Bias of the output projection.

    Shape:
        - x: (N, L, C)
        - attn_mask: boolean (True takes part) or additive, broadcastable to (N, heads, L, L). A
          query with no key to attend to gets a weighted sum of 0.
        - returns: (N, L, C); with ``return_attention`` a tuple of that and the weights before
          dropout, (N, heads, L, L)

    Raises:
        ValueError: On an unknown ``kernel``, ``num_heads`` that does not divide ``embed_dims``, or
            a ``hidden_dims`` or ``scale`` that is not positive.

    Example:
        >>> layer = MetricAttention(embed_dims=192, num_heads=3)
        >>> out, attention = layer(torch.rand(2, 196, 192), return_attention=True)
        >>> out.shape, attention.shape
        (torch.Size([2, 196, 192]), torch.Size([2, 3, 196, 196]))
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        hidden_dims: int | None = None,
        kernel: str = 'metric',
        scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        bias: bool = True,
        proj_bias: bool = True,
    ):
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f'kernel={kernel!r} is unknown, it must be one of {KERNELS}')
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(
                f'num_heads={num_heads} must be a divisor of embed_dims={embed_dims}: each head '
                'takes an equal share of the width'
            )
        if hidden_dims is not None and (kernel != 'metric' or hidden_dims < 1):
            raise ValueError(
                f"hidden_dims={hidden_dims} must be positive, and only kernel='metric' takes it "
                f'(given: {kernel!r})'
            )
        if scale is not None and not (0 < scale < math.inf):
            raise ValueError(f'scale={scale} must be positive and finite')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.kernel = kernel
        if scale is None:
            scale = (embed_dims // num_heads) ** -0.5 if kernel == 'dot' else 1.0
        self.scale = scale
        self.attn_drop = attn_drop
        if kernel == 'metric':
            hidden_dims = hidden_dims or embed_dims
            self.hidden = nn.Linear(embed_dims, hidden_dims)
            self.metric = nn.Linear(hidden_dims, embed_dims, bias=False)
        elif kernel == 'l2':
            self.metric = nn.Linear(embed_dims, embed_dims, bias=False)
        else:
            self.query_key = nn.Linear(embed_dims, 2 * embed_dims, bias=bias)
        self.value = nn.Linear(embed_dims, embed_dims, bias=bias)
        self.proj = nn.Linear(embed_dims, embed_dims, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def _split(self, x: Tensor) -> Tensor:
        """(N, L, heads * D) to (N, heads, L, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def features(self, x: Tensor) -> Tensor:
        """F(x) by head, (N, heads, L, D): the points whose distances are the scores.

        Raises:
            ValueError: With ``kernel='dot'``, which has no such map.
        """
        if self.kernel == 'metric':
            return self._split(x + self.metric(torch.tanh(self.hidden(x))))
        if self.kernel == 'l2':
            return self._split(self.metric(x))
        raise ValueError("kernel='dot' compares queries with keys and has no map of distances")

    def scores(self, x: Tensor) -> Tensor:
        """What the softmax takes, (N, heads, L, L), in float32 at least: for analysis.

        Distances are computed from differences, O(L^2 C) of memory.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.kernel == 'dot':
            query, key = self.query_key(x).to(wide).chunk(2, dim=-1)
            with torch.autocast(x.device.type, enabled=False):
                return self.scale * self._split(query) @ self._split(key).transpose(-2, -1)
        features = self.features(x).to(wide)
        differences = features.unsqueeze(-2) - features.unsqueeze(-3)
        return -self.scale * differences.square().sum(-1)

    def _attend(self, x: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
        dropout_p = self.attn_drop if self.training else 0.0
        if self.kernel != 'dot':
            return distance_attention(
                self.features(x), value, self.scale, attn_mask, dropout_p=dropout_p
            )
        query, key = self.query_key(x).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(
            self._split(query),
            self._split(key),
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            scale=self.scale,
        )

    def _weights(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        scores = self.scores(x)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        empty = (scores == -math.inf).all(-1, keepdim=True)
        # Softmax over nothing is NaN, in the backward pass too; such rows never enter it.
        return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, return_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        value = self._split(self.value(x))
        if return_attention:
            attention = self._weights(x, attn_mask).to(value.dtype)
            out = F.dropout(attention, self.attn_drop, self.training) @ value
        else:
            out = self._attend(x, value, attn_mask)
        out = self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))
        return (out, attention) if return_attention else out

    def extra_repr(self) -> str:
        return f'kernel={self.kernel!r}, num_heads={self.num_heads}, scale={self.scale:.4g}'
