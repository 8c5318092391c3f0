"""Frequency channel attention: squeeze-and-excitation on discrete cosine coefficients.

Qin, Zhang, Wu, Li: FcaNet: Frequency Channel Attention Networks, ICCV 2021,
https://arxiv.org/abs/2012.11879.
"""

import math

import torch
from torch import Tensor

from .base import StepSize
from .squeeze_excitation import channel_mlp

# "Top16" of the paper: vertical and horizontal frequency of the 16 best single coefficients, on a
# 7x7 grid.
_GRID = 7
_VERTICAL = (0, 0, 6, 0, 0, 1, 1, 4, 5, 1, 3, 0, 0, 0, 3, 2)
_HORIZONTAL = (0, 1, 0, 5, 2, 0, 2, 0, 0, 6, 0, 4, 6, 3, 5, 2)


def cosine_basis(size: int) -> Tensor:
    r"""Basis pictures of the 16 frequencies, orthonormal DCT-II, (16, size, size) float32.

    :math:`B_{u,v}(i, j) = c_u c_v \cos(\pi u (i + 1/2) / size) \cos(\pi v (j + 1/2) / size)` with
    :math:`c_0 = \sqrt{1/size}` and :math:`c_k = \sqrt{2/size}` otherwise. Frequencies that the
    paper states on its 7x7 grid are multiplied by ``size // 7``.

    Raises:
        ValueError: ``size`` is below 7, where the highest of the frequencies does not exist.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < _GRID:
        raise ValueError(f'dct_size must be an int of at least {_GRID}, got {size!r}')
    position = torch.arange(size, dtype=torch.float64) + 0.5
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    cosine = torch.cos(math.pi / size * frequency * position) * math.sqrt(2 / size)
    cosine[0] = math.sqrt(1 / size)
    scale = size // _GRID
    vertical = cosine[[u * scale for u in _VERTICAL]]
    horizontal = cosine[[v * scale for v in _HORIZONTAL]]
    return (vertical[:, :, None] * horizontal[:, None, :]).float()


_is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)


def _averages(length: int, size: int, like: Tensor) -> Tensor:
    """Adaptive average pooling along an axis as a matrix, (size, length).

    Torch's own has no deterministic gradient on GPUs, and exporters would write one with the
    windows that their example has.
    """
    i = torch.arange(size, device=like.device)[:, None]
    start, end = i * length // size, ((i + 1) * length + size - 1) // size
    position = torch.arange(length, device=like.device)
    return ((position >= start) & (position < end)).to(like.dtype) / (end - start)


class FCA(StepSize):
    r"""Step size :math:`dt = \sigma(W_2\,\mathrm{relu}(W_1 \mathrm{Freq}))`.

    The channels form 16 groups, and each group is pooled by its own two-dimensional DCT
    coefficient, the lowest of them being (a multiple of) the mean. A map of another size is
    average-pooled to ``dct_size`` x ``dct_size`` first, so that every input size works.

    Args:
        in_channels: Channels C of the residual, a multiple of 16.
        dct_size: Side of the map that the coefficients are taken on, at least 7; None takes
            ``map_size``, or 7 where that is smaller.
        reduction: r, the layers meet in ``C // r`` channels.
        bias: Whether the two layers have biases.
        map_size: Side of the stage's maps at the training resolution, which the backbones of this
            package fill in.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1)

    Raises:
        ValueError: 16 does not divide ``in_channels``, ``dct_size`` is below 7, ``reduction``
            leaves no channel.
    """

    takes_map_size = True

    def __init__(
        self,
        in_channels: int,
        dct_size: int | None = None,
        reduction: int = 16,
        bias: bool = True,
        map_size: int = _GRID,
    ):
        super().__init__(in_channels)
        if in_channels % len(_VERTICAL):
            raise ValueError(
                f'in_channels must be a multiple of {len(_VERTICAL)}, one group a frequency, '
                f'got {in_channels}'
            )
        if dct_size is None:
            dct_size = max(_GRID, map_size)
        self.dct_size = dct_size
        # A constant of the architecture: not in checkpoints, which then fit any resolution.
        self.register_buffer('basis', cosine_basis(dct_size), persistent=False)
        self.mlp = channel_mlp(in_channels, reduction, bias)

    def gate(self, residual: Tensor) -> Tensor:
        size = (self.dct_size, self.dct_size)
        if _is_exporting() or residual.shape[2:] != size:
            rows, columns = (
                _averages(length, self.dct_size, residual) for length in residual.shape[2:]
            )
            x = torch.einsum('ih,nchw,jw->ncij', rows, residual, columns)
        else:
            x = residual
        x = x.unflatten(1, (len(self.basis), -1))
        frequency = torch.einsum('ngchw,ghw->ngc', x, self.basis.to(x.dtype)).flatten(1)
        return self.mlp(frequency).sigmoid().to(residual.dtype)[:, :, None, None]

    def extra_repr(self) -> str:
        return f'dct_size={self.dct_size}'
