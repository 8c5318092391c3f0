"""Does attention measure stiffness, and does stiffness go with accuracy? Correlations.

From "Understanding Self-attention Mechanism via Dynamical System Perspective"
(https://arxiv.org/abs/2308.09939), appendix D and figure 7. scipy computes the statistics; the
p-values of rank correlations of up to eight values are exact.
"""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from .checks import check_nan_policy, to_float64


class Correlation(NamedTuple):
    """A statistic in [-1, 1] and its two-sided p-value, tensors of the same shape."""

    statistic: Tensor
    p_value: Tensor


class Correlations(NamedTuple):
    """Linear (Pearson) and rank (Spearman, Kendall tau-b) correlation."""

    pearson: Correlation
    spearman: Correlation
    kendall: Correlation


def step_size_correlation(nsi: Tensor, dt: Tensor, nan_policy: str = 'raise') -> Correlations:
    """Correlation of NSI with the step size over samples, block by block.

    Args:
        nsi: (N, L), or (N,) for one block.
        dt: the same shape, the mean step size (attention value) of each sample and block.
        nan_policy: ``'raise'``, or ``'omit'`` to leave out samples with NaN or Inf in a block and
            return NaN for a block in which a correlation is not defined.

    Returns:
        Three correlations, each with (L,) statistics and p-values; () for one block.

    Raises:
        ValueError: shapes that differ, fewer than two samples; NaN, Inf or a block in which nsi or
            dt never changes (both named) unless ``nan_policy='omit'``.
    """
    check_nan_policy(nan_policy)
    nsi, dt = (
        to_float64(name, value, dims=(1, 2)).detach() for name, value in (('nsi', nsi), ('dt', dt))
    )
    if nsi.shape != dt.shape:
        raise ValueError(
            f'nsi and dt must have the same shape, got {tuple(nsi.shape)} and {tuple(dt.shape)}'
        )
    columns = zip(
        nsi.reshape(len(nsi), -1).T.cpu().numpy(),
        dt.reshape(len(dt), -1).T.cpu().numpy(),
        strict=True,
    )
    results = [
        _correlate(x, y, ('nsi', 'dt'), f' of block {block}', nan_policy)
        for block, (x, y) in enumerate(columns)
    ]
    table = torch.tensor(np.array(results)).view(*nsi.shape[1:], 3, 2)
    return Correlations(*(Correlation(table[..., i, 0], table[..., i, 1]) for i in range(3)))


def rank_correlation(tns: Tensor, accuracy: Tensor, nan_policy: str = 'raise') -> Correlations:
    """Correlation of TNS with accuracy over models.

    Args:
        tns: (M,), one value a model.
        accuracy: (M,), in any unit: ranks do not change with it.
        nan_policy: ``'raise'``, or ``'omit'`` to leave out models with NaN or Inf and return NaN
            where a correlation is not defined.

    Returns:
        Three correlations, each with () statistic and p-value.

    Raises:
        ValueError: shapes that differ, fewer than two models; NaN, Inf or values that never change
            unless ``nan_policy='omit'``.
    """
    check_nan_policy(nan_policy)
    tns = to_float64('tns', tns, dims=(1,)).detach().cpu()
    accuracy = to_float64('accuracy', accuracy, dims=(1,)).detach().cpu()
    if tns.shape != accuracy.shape:
        raise ValueError(f'{len(tns)} values of tns do not pair with {len(accuracy)} of accuracy')
    result = _correlate(tns.numpy(), accuracy.numpy(), ('tns', 'accuracy'), '', nan_policy)
    return Correlations(*(Correlation(*torch.tensor(pair)) for pair in result))


def _correlate(x, y, names, where, nan_policy) -> np.ndarray:
    """(3, 2): Pearson, Spearman and Kendall, each with its p-value."""
    for name, values in zip(names, (x, y), strict=True):
        if nan_policy == 'raise' and not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(
                f"{name}{where} holds {values[index]} at {index}; nan_policy='omit' leaves it out"
            )
    usable = np.isfinite(x) & np.isfinite(y)
    x, y = x[usable], y[usable]
    for name, values in zip(names, (x, y), strict=True):
        if len(values) < 2 or (values == values[0]).all():
            if nan_policy == 'omit':
                return np.full((3, 2), np.nan)
            what = 'never changes' if len(values) > 1 else 'has a single value'
            raise ValueError(f'{name}{where} {what}, so it has no correlation')
    return np.array(
        [
            (result.statistic, result.pvalue)
            for result in (stats.pearsonr(x, y), _spearmanr(x, y), _kendalltau(x, y))
        ]
    )


def _spearmanr(x, y):
    result = stats.spearmanr(x, y)
    if len(x) > 8:
        return result
    # scipy's t distribution gives agreeing ranks p = 0 even for three values: count the orders.
    x, y = (stats.rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    in_any_order = np.array(list(itertools.permutations(y))) @ x
    p_value = np.mean(np.abs(in_any_order) > np.abs(x @ y) - 1e-9)
    return SimpleNamespace(statistic=result.statistic, pvalue=p_value)


def _kendalltau(x, y):
    result = stats.kendalltau(x, y)
    if len(x) > 8:
        return result
    # With ties scipy takes a normal distribution: count the orders. They change the sum of agreeing
    # less disagreeing pairs alone, not the ties that tau-b is divided by.
    x, y = (np.sign(values[:, None] - values) for values in (x, y))
    orders = np.array(list(itertools.permutations(range(len(y)))))
    in_any_order = np.array([(x * y[order][:, order]).sum() for order in orders])
    p_value = np.mean(np.abs(in_any_order) >= np.abs((x * y).sum()))
    return SimpleNamespace(statistic=result.statistic, pvalue=p_value)
