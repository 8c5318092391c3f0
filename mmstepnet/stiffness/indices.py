r"""Stiffness of one step: the neural stiffness index (NSI) and the stiffness-aware index (SAI).

From "Understanding Self-attention Mechanism via Dynamical System Perspective"
(https://arxiv.org/abs/2308.09939), definitions 2 and 3. Both measure how fast a trajectory moves
relative to its size; NSI reads a residual network as the trajectory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import check_nan_policy, to_float64


def neural_stiffness_index(
    state: Tensor, increment: Tensor, eps: float = 0.0, nan_policy: str = 'raise'
) -> Tensor:
    r"""NSI of each sample, :math:`\|f(x)\|_2 / \|x\|_2` (definition 3).

    Norms run over everything but the batch and are accumulated in float64.

    Args:
        state: (N, ...), what the shortcut delivers.
        increment: (N, ...) of the same shape, what the block adds, for step size one.
        eps: A state whose norm is not larger than this counts as zero.
        nan_policy: ``'raise'``, or ``'omit'`` to get NaN for a sample that has no NSI.

    Returns:
        (N,) float64, differentiable in both arguments.

    Raises:
        ValueError: shapes that differ, no sample, a negative ``eps``; a state of norm zero, NaN or
            Inf (the sample is named) unless ``nan_policy='omit'``.
    """
    if state.shape != increment.shape:
        raise ValueError(
            'state and increment must have the same shape, '
            f'got {tuple(state.shape)} and {tuple(increment.shape)}'
        )
    if state.dim() < 2 or state.numel() == 0:
        raise ValueError(
            f'state must hold at least one sample, shape (N, ...), got {tuple(state.shape)}'
        )
    dims = tuple(range(1, state.dim()))
    norms = (torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64) for x in (increment, state))
    return divide_norms(*norms, eps=eps, nan_policy=nan_policy)


def divide_norms(
    increment_norm: Tensor,
    state_norm: Tensor,
    names: Sequence[str] | None = None,
    eps: float = 0.0,
    nan_policy: str = 'raise',
    first_sample: int = 0,
) -> Tensor:
    """NSI from norms that were already taken.

    Args:
        increment_norm: (N,) or (N, L).
        state_norm: the same shape.
        names: The L blocks' names, for the error message.
        eps: A state whose norm is not larger than this counts as zero.
        nan_policy: ``'raise'``, or ``'omit'`` to get NaN where there is no NSI.
        first_sample: Number of the first row, for the error message.

    Returns:
        Quotients in float64, the same shape.

    Raises:
        ValueError: a state of norm zero, NaN or Inf, named by block and sample.
    """
    check_nan_policy(nan_policy)
    if not eps >= 0:
        raise ValueError(f'eps must not be negative, got {eps}')
    increment_norm, state_norm = increment_norm.double(), state_norm.double()
    finite = (increment_norm.isfinite() & state_norm.isfinite()).detach()
    usable = finite & (state_norm.detach() > eps)
    if nan_policy == 'raise' and not usable.all():
        index = (~usable).nonzero()[0].tolist()
        where = f'sample {first_sample + index[0]}'
        if len(index) == 2:
            where = f'block {names[index[1]] if names else index[1]}, {where}'
        what = (
            'the state has norm zero'
            if finite[tuple(index)]
            else 'features or the step size are NaN or Inf (so is the step size of a gate that is '
            'given zeros only, behind a zero-initialised last norm for instance)'
        )
        raise ValueError(
            f"{where}: {what}, so NSI is not defined; nan_policy='omit' leaves the sample out"
        )
    # Replacing the divisor before dividing keeps NaN out of the usable samples' gradients.
    quotient = increment_norm / state_norm.where(usable, torch.ones_like(state_norm))
    return quotient.where(usable, torch.full_like(quotient, torch.nan))


def stiffness_aware_index(states: Tensor, times: Tensor, nan_policy: str = 'raise') -> Tensor:
    r"""SAI of a discrete trajectory (definition 2).

    .. math:: \mathrm{SAI}_i = \frac{\|(u_{i+1} - u_i) / (t_{i+1} - t_i)\|_2}{\|u_i\|_2}

    Args:
        states: (T, D), or (T, N, D) for N trajectories at the same times.
        times: (T,), strictly increasing or strictly decreasing.
        nan_policy: ``'raise'``, or ``'omit'`` to get NaN where there is no SAI.

    Returns:
        (T - 1,) or (T - 1, N), float64, differentiable.

    Raises:
        ValueError: fewer than two states, wrong shapes, times that stand still or turn back, a
            state of norm zero, NaN or Inf (named) unless ``nan_policy='omit'``.
    """
    check_nan_policy(nan_policy)
    states = to_float64('states', states, dims=(2, 3))
    times = to_float64('times', times, dims=(1,)).to(states.device)
    if len(states) < 2 or len(times) != len(states):
        raise ValueError(
            'a trajectory needs at least two states and one time for each, '
            f'got {len(states)} states and {len(times)} times'
        )
    elapsed = times.diff()
    if not ((elapsed > 0).all() or (elapsed < 0).all()) or not times.isfinite().all():
        raise ValueError('times must be finite and strictly increasing or strictly decreasing')
    speed = torch.linalg.vector_norm(states.diff(dim=0), dim=-1)
    speed = speed / elapsed.abs().view(-1, *[1] * (states.dim() - 2))
    size = torch.linalg.vector_norm(states[:-1], dim=-1)
    usable = (speed.isfinite() & size.isfinite() & (size > 0)).detach()
    if nan_policy == 'raise' and not usable.all():
        index = (~usable).nonzero()[0].tolist()
        where = f'step {index[0]}' + (f' of trajectory {index[1]}' if len(index) == 2 else '')
        raise ValueError(
            f'{where}: the state has norm zero or is NaN or Inf, so SAI is not defined; '
            "nan_policy='omit' returns NaN there"
        )
    quotient = speed / size.where(usable, torch.ones_like(size))
    return quotient.where(usable, torch.full_like(quotient, torch.nan))
