"""Norms of feature maps in float64 that never hold a whole feature map in float64."""

import torch
from torch import Tensor

# Elements converted at a time: what stays in a core's cache, and what keeps an accelerator busy.
_CPU_CHUNK = 1 << 17
_ACCELERATOR_CHUNK = 1 << 24


@torch.no_grad()
def sample_norms(x: Tensor, minus: Tensor | None = None, times: Tensor | None = None) -> Tensor:
    r""":math:`\|(x - \mathrm{minus}) \cdot \mathrm{times}\|_2` of each sample.

    Args:
        x: (N, ...), any floating-point dtype.
        minus: Broadcastable to the shape of ``x``.
        times: Broadcastable to the shape of ``x``.

    Returns:
        (N,) float64, accumulated in float64, on the device of ``x``, without a graph.

    Raises:
        ValueError: ``x`` is empty.
    """
    if x.numel() == 0:
        raise ValueError(f'features of shape {tuple(x.shape)} hold nothing to take a norm of')
    minus, times = (None if t is None else t.expand_as(x) for t in (minus, times))

    def converted(index) -> Tensor:
        # A copy where it is changed: float64 features are those of the network itself.
        part = x[index].to(torch.float64, copy=minus is not None or times is not None)
        if minus is not None:
            part = part.sub_(minus[index])
        return part if times is None else part.mul_(times[index])

    if x.device.type != 'cpu' or x.dim() == 2:
        size = max(1, _ACCELERATOR_CHUNK // x[0].numel())
        chunks = (converted(slice(i, i + size)) for i in range(0, len(x), size))
        return torch.cat([chunk.flatten(1).square().sum(dim=1) for chunk in chunks]).sqrt()

    size = max(1, _CPU_CHUNK // x[0, 0].numel())
    norms = x.new_zeros(len(x), dtype=torch.float64)
    for n in range(len(x)):
        for i in range(0, x.shape[1], size):
            part = converted((n, slice(i, i + size))).flatten()
            norms[n] += torch.dot(part, part)
    return norms.sqrt_()


@torch.no_grad()
def mean_quotient(after: Tensor, before: Tensor) -> Tensor:
    """Mean of ``after / before`` over each sample's elements where ``before`` is not zero.

    Args:
        after: (N, ...), what a gate returned.
        before: The same shape, what it was given.

    Returns:
        (N,) float64: the mean value of the gate; NaN where ``before`` is zero everywhere.
    """
    chunk = _CPU_CHUNK if after.device.type == 'cpu' else _ACCELERATOR_CHUNK
    size = max(1, chunk // max(1, after[0].numel()))
    pairs = zip(after.split(size), before.split(size), strict=True)
    return torch.cat([(a.double() / b.double()).flatten(1).nanmean(1) for a, b in pairs])
