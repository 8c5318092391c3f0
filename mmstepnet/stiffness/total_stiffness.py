r"""Stiffness of whole trajectories: TNS, the stiffness degree delta and the proportion p-hat.

From "Understanding Self-attention Mechanism via Dynamical System Perspective"
(https://arxiv.org/abs/2308.09939), section 3. Block t of stage s is stiff at thresholds
:math:`M = (M_1, M_2)` when :math:`\mathrm{NSI}_t \ge \max(\mu_s (1 + M_1), M_2)`, where
:math:`\mu_s` is the sample's mean NSI in that stage: stiff against its neighbours, and stiff at
all.

Why no grid is needed: for one sample, block t is stiff exactly for the thresholds in the rectangle
:math:`[0, \mathrm{NSI}_t / \mu_s - 1] \times [0, \mathrm{NSI}_t]`. The degree asks for any stiff
block, so its integral is the mean area of the rectangles' union; in one stage the largest NSI's
rectangle holds the others, and a union of rectangles that share a corner is a staircase.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_nsi


class TNS(NamedTuple):
    """Total neural stiffness with its spread over samples.

    Attributes:
        mean: () float64, the TNS.
        std_error: () float64, s / sqrt(N), N - 1 in s; NaN with one sample.
        per_sample: (N,) float64, one row for each sample given; NaN for one that was left out.
    """

    mean: Tensor
    std_error: Tensor
    per_sample: Tensor

    @property
    def num_omitted(self) -> int:
        """Number of samples that ``nan_policy='omit'`` left out."""
        return int(self.per_sample.isnan().sum())


def total_neural_stiffness(nsi: Tensor, stages: Tensor, nan_policy: str = 'raise') -> TNS:
    r"""TNS, the double integral of the stiffness degree over all thresholds (definition 4).

    Exact, in O(N (L + S log S)) for S stages, without a grid; see the module's docstring.

    Args:
        nsi: (N, L), NSI of each sample and block.
        stages: (L,) integers, the stage of each block.
        nan_policy: ``'raise'``, or ``'omit'`` to leave out samples with NaN or Inf.

    Returns:
        ``TNS(mean, std_error, per_sample)``, float64, differentiable in ``nsi`` almost everywhere.

    Raises:
        TypeError: stage labels that are not integers.
        ValueError: nothing recorded, wrong shapes, negative values; NaN or Inf (named) unless
            ``nan_policy='omit'``.
    """
    nsi, stages, keep = check_nsi(nsi, stages, nan_policy)
    mean, height = _stage_mean_and_max(nsi, stages)
    # A stage that stands still (mean 0) has height 0, so any finite width gives it no area.
    width = (height / mean.where(mean > 0, torch.ones_like(mean)) - 1).clamp(min=0)
    width, order = width.sort(dim=1, descending=True)
    step = (
        height.gather(1, order)
        .cummax(dim=1)
        .values.diff(dim=1, prepend=torch.zeros_like(height[:, :1]))
    )
    area = (width * step).sum(dim=1)

    if len(area) > 1:
        std_error = area.std() / len(area) ** 0.5
    else:
        std_error = torch.full_like(area[0], torch.nan)
    per_sample = torch.full(keep.shape, torch.nan, dtype=area.dtype, device=area.device)
    return TNS(area.mean(), std_error, per_sample.masked_scatter(keep, area))


def stiffness_degree(
    nsi: Tensor, stages: Tensor, m1: Tensor, m2: Tensor, nan_policy: str = 'raise'
) -> Tensor:
    r"""Degree :math:`\delta(M)`: the share of samples with at least one stiff block.

    Exact at the thresholds given, which are inclusive. Its integral over all thresholds is TNS.

    Args:
        nsi: (N, L), NSI of each sample and block.
        stages: (L,) integers, the stage of each block.
        m1: (K1,) relative thresholds, not negative, in any order.
        m2: (K2,) absolute thresholds, not negative, in any order.
        nan_policy: ``'raise'``, or ``'omit'`` to leave out samples with NaN or Inf.

    Returns:
        (K1, K2) float64, in [0, 1].

    Raises:
        ValueError: negative or infinite thresholds, and what ``total_neural_stiffness`` raises.
    """
    nsi, stages, _ = check_nsi(nsi, stages, nan_policy)
    nsi = nsi.detach()
    m1, m2 = _Thresholds('m1', m1, nsi.device), _Thresholds('m2', m2, nsi.device)
    mean, height = _stage_mean_and_max(nsi, stages)
    # Counting thresholds instead of comparing with each turns a rectangle into a pair of integers,
    # and the staircase's corners into entries of one small table.
    wide, order = m1.count_relative(height, mean, height).sort(dim=1, descending=True)
    high = m2.count(height).gather(1, order).cummax(dim=1).values
    table = _histogram(wide, high, m1, m2)
    table -= _histogram(wide[:, 1:], high[:, :-1], m1, m2)  # where neighbouring rectangles overlap
    return _count_above(table, m1, m2) / len(nsi)


def stiffness_proportion(
    nsi: Tensor, stages: Tensor, m1: Tensor, m2: Tensor, nan_policy: str = 'raise'
) -> Tensor:
    r"""Proportion :math:`\hat p(M)`: the share of stiff blocks, over blocks and samples.

    Exact at the thresholds given, which are inclusive. Its integral over all thresholds is
    :math:`E[\frac1L \sum_t \max(0, \mathrm{NSI}_t / \mu_s - 1) \mathrm{NSI}_t]`.

    Arguments, result and errors are those of :func:`stiffness_degree`.
    """
    nsi, stages, _ = check_nsi(nsi, stages, nan_policy)
    nsi = nsi.detach()
    m1, m2 = _Thresholds('m1', m1, nsi.device), _Thresholds('m2', m2, nsi.device)
    mean, height = _stage_mean_and_max(nsi, stages)
    stage_of_block = stages.unique(return_inverse=True)[1]
    table = torch.zeros(len(m1) + 1, len(m2) + 1, dtype=torch.int64, device=nsi.device)
    for block, stage in enumerate(stage_of_block.tolist()):
        value = nsi[:, block]
        wide = m1.count_relative(value, mean[:, stage], height[:, stage])
        table += _histogram(wide, m2.count(value), m1, m2)
    return _count_above(table, m1, m2) / nsi.numel()


class _Thresholds:
    """Sorted distinct thresholds, and how many of them a value reaches."""

    def __init__(self, name: str, values: Tensor, device: torch.device):
        values = torch.as_tensor(values, dtype=torch.float64, device=device)
        if values.dim() != 1 or len(values) == 0:
            raise ValueError(
                f'{name} must be a list of thresholds, shape (K,), got {tuple(values.shape)}'
            )
        if not values.isfinite().all() or (values < 0).any():
            raise ValueError(
                f'{name} must hold finite thresholds that are not negative, '
                f'got a range of {values.min().item()} to {values.max().item()}'
            )
        self.values, self.given = values.unique(return_inverse=True)

    def __len__(self) -> int:
        return len(self.values)

    def count(self, value: Tensor) -> Tensor:
        """Number of thresholds m with ``value >= m``."""
        return torch.searchsorted(self.values, value.contiguous(), right=True)

    def count_relative(self, value: Tensor, mean: Tensor, maximum: Tensor) -> Tensor:
        """Number of thresholds m with ``value >= mean * (1 + m)``."""

        def reaches(i):
            return value >= mean * (1 + self.values[i])

        moving = mean > 0
        ratio = value / mean.where(moving, torch.ones_like(mean)) - 1
        count = self.count(ratio.where(moving, self.values[-1]))
        # The quotient is rounded, so a threshold met exactly can be missed or taken by one ulp.
        count = count + ((count < len(self)) & reaches(count.clamp(max=len(self) - 1))).long()
        count = count - ((count > 0) & ~reaches((count - 1).clamp(min=0))).long()
        # No mean lies above the maximum, whatever its own rounding says.
        return torch.maximum(count, (value == maximum).long() * (self.values <= 0).sum())


def _stage_mean_and_max(nsi: Tensor, stages: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and largest NSI of every stage, both (N, S), stages in the order of their labels."""
    groups = [nsi[:, stages == label] for label in stages.unique()]
    mean = torch.stack([group.mean(dim=1) for group in groups], dim=1)
    return mean, torch.stack([group.amax(dim=1) for group in groups], dim=1)


def _histogram(wide: Tensor, high: Tensor, m1: _Thresholds, m2: _Thresholds) -> Tensor:
    size = (len(m1) + 1, len(m2) + 1)
    cell = (wide * size[1] + high).flatten()
    return torch.bincount(cell, minlength=size[0] * size[1]).view(size)


def _count_above(table: Tensor, m1: _Thresholds, m2: _Thresholds) -> Tensor:
    """Turn counts of corners into counts of rectangles that hold each pair of thresholds."""
    above = table.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)[1:, 1:]
    return above[m1.given][:, m2.given].double()
