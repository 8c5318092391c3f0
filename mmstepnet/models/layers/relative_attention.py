"""Self-attention over pixels by relative position, and convolutions written as such.

Cordonnier, Loukas, Jaggi: On the Relationship between Self-Attention and Convolutional Layers,
ICLR 2020, https://arxiv.org/abs/1911.03584.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmstepnet.registry import MODELS

POSITIONS = ('quadratic', 'learned')
PRECISIONS = ('isotropic', 'general')


@MODELS.register_module()
class RelativeAttention2d(nn.Module):
    r"""Multi-head self-attention whose scores depend on where the key lies from the query.

    With :math:`\delta` = position of the key - position of the query, in (row, column):

    - ``position='quadratic'``: :math:`-\|M_h (\delta - \Delta_h)\|^2`, a Gaussian window of each
      head h around its centre :math:`\Delta_h`. :math:`M_h` is a number with
      ``precision='isotropic'`` (then :math:`\alpha_h = M_h^2`) and a 2x2 matrix with ``'general'``.
    - ``position='learned'``: :math:`r_{\delta_1} \cdot u_h + c_{\delta_2} \cdot v_h` with learned
      vectors for every row and column offset.

    ``content=True`` adds :math:`q_i \cdot k_j / \sqrt{C_{in}}`, each head with queries and keys of
    the full input width. Values have the full width too: the output is
    :math:`\sum_h A_h X W_h + b`.

    Without content the scores are the same for every sample and are computed once a forward pass.
    Where they are a sum of a row and a column term (all but the general precision), so do the
    weights factorise, :math:`A_h = R_h \otimes C_h`: nothing larger than H x H and W x W is made,
    and attention costs two small matrix products.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        num_heads: Heads.
        position: ``'quadratic'`` or ``'learned'``.
        content: Add query-key products.
        precision: ``'isotropic'`` or ``'general'``, with ``position='quadratic'``.
        max_size: Largest height and width, with ``position='learned'``.
        embed_dims: Width of the offsets' vectors, with ``position='learned'``; ``in_channels`` by
            default.
        stride: Queries are every ``stride``-th pixel in each direction. Not with ``content``.
        padding: Keys reach this far beyond the border, where the input counts as 0. Not with
            ``content``.
        bias: Bias of the output; queries and keys have theirs in any case.
        center_std: Spread of the centres' random start, in pixels.

    Shape:
        - x: (N, in_channels, H, W)
        - returns: (N, out_channels, ceil(H / stride), ceil(W / stride)); with ``return_attention``
          a tuple of that and the weights, (N, heads, queries, H * W) in row-major order. Without
          content they are one tensor expanded over N. What a query gives to the padding is
          missing in its sum.

    Raises:
        ValueError: On arguments that are unknown or don't go together, and on inputs larger than
            ``max_size``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_heads: int = 9,
        position: str = 'quadratic',
        content: bool = False,
        precision: str = 'isotropic',
        max_size: int = 16,
        embed_dims: int | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = True,
        center_std: float = 2.0,
    ):
        super().__init__()
        if position not in POSITIONS:
            raise ValueError(f'position={position!r} is unknown, it must be one of {POSITIONS}')
        if precision not in PRECISIONS:
            raise ValueError(f'precision={precision!r} is unknown, it must be one of {PRECISIONS}')
        if precision == 'general' and position != 'quadratic':
            raise ValueError("precision='general' needs position='quadratic'")
        if num_heads < 1:
            raise ValueError(f'num_heads={num_heads} must be at least 1')
        self.stride, self.padding = _pair(stride), _pair(padding)
        if min(self.stride) < 1 or min(self.padding) < 0:
            raise ValueError(f'stride={stride} must be at least 1 and padding={padding} at least 0')
        if self.stride != (1, 1) or self.padding != (0, 0):
            if content:
                raise ValueError('content=True takes stride=1 and padding=0 only')
            if position == 'learned':
                raise ValueError("position='learned' takes stride=1 and padding=0 only")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.num_heads = num_heads
        self.position = position
        self.content = content
        self.precision = precision
        self.max_size = max_size
        self.center_std = center_std
        if position == 'quadratic':
            self.centers = nn.Parameter(torch.empty(num_heads, 2))
            shape = (num_heads,) if precision == 'isotropic' else (num_heads, 2, 2)
            self.spreads = nn.Parameter(torch.empty(shape))
        else:
            embed_dims = embed_dims or in_channels
            self.row_embedding = nn.Parameter(torch.empty(2 * max_size - 1, embed_dims))
            self.col_embedding = nn.Parameter(torch.empty(2 * max_size - 1, embed_dims))
            self.row_keys = nn.Linear(embed_dims, num_heads, bias=False)
            self.col_keys = nn.Linear(embed_dims, num_heads, bias=False)
        if content:
            self.query = nn.Linear(in_channels, num_heads * in_channels)
            self.key = nn.Linear(in_channels, num_heads * in_channels)
        self.value = nn.Linear(num_heads * in_channels, out_channels, bias=bias)
        self.reset_positions()

    def reset_positions(self) -> None:
        """Draw centres from N(0, center_std^2), spreads near 1, offsets' vectors from N(0, 1)."""
        with torch.no_grad():
            if self.position == 'quadratic':
                self.centers.normal_(0, self.center_std)
                self.spreads.normal_(0, 0.01)
                self.spreads += (
                    1 if self.precision == 'isotropic' else torch.eye(2).to(self.spreads)
                )
            else:
                self.row_embedding.normal_()
                self.col_embedding.normal_()

    @property
    def separable(self) -> bool:
        """Whether the position's weights are a product of a row and a column factor."""
        return self.precision == 'isotropic'

    def _offsets(self, size: int, axis: int) -> Tensor:
        """Key - query along one axis, padded keys included, (queries, keys)."""
        device = self.value.weight.device
        keys = torch.arange(-self.padding[axis], size + self.padding[axis], device=device)
        return keys - torch.arange(0, size, self.stride[axis], device=device)[:, None]

    def _axis_scores(self, size: int, axis: int) -> Tensor:
        """The row (axis 0) or column (axis 1) term of the scores, (heads, queries, keys)."""
        if self.position == 'learned':
            if size > self.max_size:
                raise ValueError(
                    f'an input of size {size} is larger than max_size={self.max_size}, the offsets '
                    'that have learned vectors'
                )
            embedding = (self.row_embedding, self.col_embedding)[axis]
            heads = (self.row_keys, self.col_keys)[axis](embedding).T
            return heads[:, self._offsets(size, axis) + self.max_size - 1]
        offsets = self._offsets(size, axis).to(self.centers)
        from_center = offsets - self.centers[:, axis, None, None]
        return -(self.spreads[:, None, None] * from_center).square()

    def _inside(self, size: int, axis: int) -> slice:
        return slice(self.padding[axis], self.padding[axis] + size)

    def _axis_weights(self, size: int, axis: int) -> Tensor:
        weights = self._axis_scores(size, axis).softmax(-1)
        return weights[..., self._inside(size, axis)]

    def position_scores(self, height: int, width: int) -> Tensor:
        """Scores of relative position, (heads, query rows, query columns, key rows, key columns).

        Keys in the padding are included.
        """
        if self.separable:
            rows = self._axis_scores(height, 0)[:, :, None, :, None]
            return rows + self._axis_scores(width, 1)[:, None, :, None, :]
        rows = self._offsets(height, 0)[:, None, :, None].to(self.centers)
        cols = self._offsets(width, 1)[None, :, None, :].to(self.centers)
        center = self.centers[:, :, None, None, None, None]
        matrix = self.spreads[..., None, None, None, None]
        rows, cols = rows - center[:, 0], cols - center[:, 1]
        scores = (matrix[:, 0, 0] * rows + matrix[:, 0, 1] * cols).square()
        return -(scores + (matrix[:, 1, 0] * rows + matrix[:, 1, 1] * cols).square())

    def position_attention(self, height: int, width: int) -> Tensor:
        """Weights of relative position alone, for an input of this size.

        Returns:
            Tensor: (heads, query rows, query columns, height, width).
        """
        if self.separable:
            rows, cols = self._axis_weights(height, 0), self._axis_weights(width, 1)
            return rows[:, :, None, :, None] * cols[:, None, :, None, :]
        scores = self.position_scores(height, width)
        weights = scores.flatten(-2).softmax(-1).view_as(scores)
        return weights[..., self._inside(height, 0), self._inside(width, 1)]

    def _content_parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (N, heads, L, in_channels), positions' scores (heads, L, L)."""
        tokens = x.flatten(2).transpose(1, 2)
        query, key = (
            layer(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key)
        )
        length = tokens.shape[1]
        scores = self.position_scores(*x.shape[-2:]).view(self.num_heads, length, length)
        return query, key, scores

    def attention(self, x: Tensor) -> Tensor:
        """The weights for an input, (N, heads, queries, H * W)."""
        if self.content:
            query, key, scores = self._content_parts(x)
            wide = torch.promote_types(query.dtype, torch.float32)
            with torch.autocast(x.device.type, enabled=False):
                products = query.to(wide) @ key.to(wide).transpose(-2, -1)
            return (products / math.sqrt(self.in_channels) + scores).softmax(-1)
        weights = self.position_attention(*x.shape[-2:]).flatten(3).flatten(1, 2)
        return weights.expand(len(x), *weights.shape)

    def _mix(self, x: Tensor) -> Tensor:
        """Every head's weighted sums of the input, (N, heads, in_channels, queries)."""
        height, width = x.shape[-2:]
        if self.content:
            query, key, scores = self._content_parts(x)
            tokens = x.flatten(2).transpose(1, 2).unsqueeze(1).expand(-1, self.num_heads, -1, -1)
            out = F.scaled_dot_product_attention(
                query, key, tokens.to(query.dtype), attn_mask=scores.to(query.dtype)
            )
            return out.transpose(-2, -1)
        if self.separable:
            rows = self._axis_weights(height, 0).to(x.dtype)
            cols = self._axis_weights(width, 1).to(x.dtype)
            mixed = torch.einsum('hij,ncjw->nhciw', rows, x)
            return torch.einsum('nhciw,hkw->nhcik', mixed, cols).flatten(3)
        weights = self.position_attention(height, width).flatten(3).flatten(1, 2).to(x.dtype)
        return torch.einsum('hqk,nck->nhcq', weights, x.flatten(2))

    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        if return_attention:
            attention = self.attention(x)
            mixed = torch.einsum('nhqk,nck->nhcq', attention.to(x.dtype), x.flatten(2))
        else:
            mixed = self._mix(x)
        out = self.value(mixed.flatten(1, 2).transpose(1, 2)).transpose(1, 2)
        out = out.unflatten(
            -1, [-(-n // s) for n, s in zip(x.shape[-2:], self.stride, strict=True)]
        )
        return (out, attention) if return_attention else out

    def head_conditions(self) -> Tensor:
        """Condition number of each head's precision :math:`M_h^T M_h`, (heads,); inf if singular.

        Raises:
            ValueError: With ``position='learned'``.
        """
        if self.position != 'quadratic':
            raise ValueError("position='learned' has no precision to take a condition number of")
        spreads = self.spreads.detach().double()
        if self.precision == 'isotropic':
            return torch.where(spreads == 0, math.inf, 1.0)
        largest, smallest = torch.linalg.svdvals(spreads).unbind(-1)
        return torch.where(smallest == 0, math.inf, (largest / smallest).square())

    @torch.no_grad()
    def sound_heads(self, max_condition: float = 1000.0, min_precision: float = 1e-5) -> Tensor:
        r"""Indices of the heads that have not degenerated to a stripe or to a mean over the image.

        Stripes have a precision :math:`M_h^T M_h` of condition number above ``max_condition``,
        means one whose largest eigenvalue is below ``min_precision``.

        Raises:
            ValueError: With ``position='learned'``, or if there is no such head.
        """
        conditions = self.head_conditions()
        spreads = self.spreads.double()
        if self.precision == 'isotropic':
            largest = spreads.square()
        else:
            largest = torch.linalg.svdvals(spreads)[..., 0].square()
        keep = ((conditions <= max_condition) & (largest >= min_precision)).nonzero().flatten()
        if not len(keep):
            raise ValueError(
                f'max_condition={max_condition} and min_precision={min_precision} leave none of '
                f'the {self.num_heads} heads'
            )
        return keep

    @torch.no_grad()
    def prune_heads(self, max_condition: float = 1000.0, min_precision: float = 1e-5) -> Tensor:
        """Remove all but the :meth:`sound_heads` in place.

        Returns:
            Tensor: Indices of the heads that stay, counted before.

        Raises:
            ValueError: As :meth:`sound_heads`; then nothing has changed.
        """
        keep = self.sound_heads(max_condition, min_precision)
        value = self.value.weight.unflatten(1, (self.num_heads, -1))
        self.num_heads = len(keep)
        self.centers = nn.Parameter(self.centers[keep])
        self.spreads = nn.Parameter(self.spreads[keep])
        self.value.weight = nn.Parameter(value[:, keep].flatten(1))
        self.value.in_features = self.value.weight.shape[1]
        if self.content:
            for layer in (self.query, self.key):
                weight = layer.weight.unflatten(0, (-1, self.in_channels))[keep]
                layer.weight = nn.Parameter(weight.flatten(0, 1))
                bias = layer.bias.unflatten(0, (-1, self.in_channels))[keep]
                layer.bias = nn.Parameter(bias.flatten())
                layer.out_features = len(layer.bias)
        return keep

    def extra_repr(self) -> str:
        text = f'{self.in_channels}, {self.out_channels}, num_heads={self.num_heads}, '
        text += f'position={self.position!r}, content={self.content}'
        if self.position == 'quadratic':
            text += f', precision={self.precision!r}'
        return text


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def attention_from_conv(conv: nn.Conv2d, alpha: float = 100.0) -> RelativeAttention2d:
    r"""The attention layer that computes what a convolution computes: theorem 1 as code.

    A kernel of :math:`K_1 \times K_2` becomes that many heads, each centred on the offset of one
    of its entries with :math:`\alpha` so large that the weight of every other pixel, at most
    :math:`e^{-\alpha}` of the centre's, is below rounding. The head's value matrix is the kernel's
    entry. Keys reach into the zero padding, so borders come out as the convolution's.

    Stride, dilation, groups and kernels of even size are taken over, as long as the output has the
    input's size divided by the stride: then queries are pixels of the input.

    Args:
        conv: The convolution.
        alpha: :math:`\alpha` of every head.

    Returns:
        RelativeAttention2d: With the convolution's weights copied, on its device, in its dtype.

    Raises:
        TypeError: ``conv`` is no ``torch.nn.Conv2d``.
        ValueError: The padding is not by zeros, or its total is not dilation * (kernel_size - 1).
    """
    if not isinstance(conv, nn.Conv2d):
        raise TypeError(f'conv must be a torch.nn.Conv2d, not {type(conv).__name__}')
    if conv.padding_mode != 'zeros':
        raise ValueError(
            f"padding_mode={conv.padding_mode!r} has no attention layer, it must be 'zeros'"
        )
    reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    if conv.padding == 'same':
        before = [total // 2 for total in reach]
    else:
        before = [0, 0] if conv.padding == 'valid' else list(conv.padding)
        if [2 * p for p in before] != reach:
            raise ValueError(
                f'kernel_size={conv.kernel_size}, dilation={conv.dilation} need a total padding of '
                f'dilation * (kernel_size - 1) = {tuple(reach)}, half of it on each side, but '
                f'padding={conv.padding}: outputs would lie between or beyond the pixels that '
                "attend. Give that padding; for even kernels use padding='same'"
            )
    rows, cols = (
        torch.arange(k) * d - p
        for k, d, p in zip(conv.kernel_size, conv.dilation, before, strict=True)
    )
    attention = RelativeAttention2d(
        conv.in_channels,
        conv.out_channels,
        num_heads=len(rows) * len(cols),
        stride=conv.stride,
        padding=tuple(total - p for total, p in zip(reach, before, strict=True)),
        bias=conv.bias is not None,
    ).to(conv.weight)
    # (out, in / groups, K1, K2) to a dense (out, in, K1, K2): zero between groups.
    blocks = conv.weight.detach().chunk(conv.groups)
    width = conv.in_channels // conv.groups
    dense = conv.weight.new_zeros(conv.out_channels, conv.in_channels, *conv.kernel_size)
    height = conv.out_channels // conv.groups
    for i, block in enumerate(blocks):
        dense[i * height : (i + 1) * height, i * width : (i + 1) * width] = block
    with torch.no_grad():
        attention.centers.copy_(torch.cartesian_prod(rows, cols))
        attention.spreads.fill_(math.sqrt(alpha))
        attention.value.weight.copy_(dense.flatten(2).transpose(1, 2).flatten(1))
        if conv.bias is not None:
            attention.value.bias.copy_(conv.bias)
    return attention.train(conv.training)
