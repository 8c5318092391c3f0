r"""The stiffness index (SI) of a vector field: the largest :math:`|\Re \lambda|` of its Jacobian.

From "Understanding Self-attention Mechanism via Dynamical System Perspective"
(https://arxiv.org/abs/2308.09939), definition 1. The Jacobian of a residual branch is neither
symmetric nor small, so its outermost eigenvalues are found by Arnoldi iteration (ARPACK) on
Jacobian-vector products in forward mode; power iteration on J^T J would give singular values.
"""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs
from torch import Tensor

from .checks import check_nan_policy


def stiffness_index(
    func: Callable[[Tensor], Tensor],
    state: Tensor,
    k: int = 6,
    tol: float | None = None,
    max_iter: int | None = None,
    nan_policy: str = 'raise',
) -> float:
    r"""SI of ``func`` at ``state``, :math:`\max_i |\Re \lambda_i(J)|`, without building J.

    The k eigenvalues of largest and the k of smallest real part are computed. In a space so small
    that the Krylov basis of ``max(4 k, 40)`` vectors would fill it (or k leaves ARPACK no room),
    J is built column by column and all its eigenvalues are taken.

    Args:
        func: A vector field that returns the shape it gets and has forward-mode derivatives. A
            network must be in evaluation mode: BN in training mode has no Jacobian of its own. A
            batch of states has a block-diagonal Jacobian, so its SI is the largest of its samples.
        state: Any shape; the point where the Jacobian is taken. Products are computed in its dtype,
            the iteration in float64: give float64 (and ``module.double()``) for more than about
            five digits.
        k: How many eigenvalues to look for at each end. More is slower and safer.
        tol: Relative accuracy of the eigenvalues; by default 1e-10, and the dtype's precision where
            that is coarser.
        max_iter: Restarts that ARPACK may use, 1000 by default.
        nan_policy: ``'raise'``, or ``'omit'`` to return NaN where the Jacobian isn't finite.

    Returns:
        SI, in 1 / (unit of step size).

    Raises:
        TypeError: ``state`` is not a real floating-point tensor.
        ValueError: an empty state, ``k < 1``, a result of another shape, NaN or Inf.
        RuntimeError: the iteration did not converge.
    """
    check_nan_policy(nan_policy)
    if not isinstance(state, Tensor) or not state.is_floating_point():
        raise TypeError(f'state must be a floating-point tensor, got {_describe(state)}')
    if state.numel() == 0:
        raise ValueError(f'state is empty: shape {tuple(state.shape)}')
    if k < 1:
        raise ValueError(f'k must be at least 1, got {k}')
    state = state.detach()
    size = state.numel()

    def product(vector: np.ndarray) -> np.ndarray:
        direction = torch.from_numpy(np.ascontiguousarray(vector, dtype=np.float64))
        direction = direction.to(state.device, state.dtype).view(state.shape)
        value, derivative = torch.func.jvp(func, (state,), (direction,))
        if value.shape != state.shape:
            raise ValueError(
                'func must return the shape it gets, '
                f'got {tuple(value.shape)} for {tuple(state.shape)}'
            )
        if not derivative.isfinite().all():
            raise _NotFinite
        return derivative.detach().double().flatten().cpu().numpy()

    basis = max(4 * k, 40)
    try:
        if basis >= size or k >= size - 1:
            identity = np.eye(size)
            jacobian = np.stack([product(column) for column in identity], axis=1)
            real = np.linalg.eigvals(jacobian).real
        else:
            real = _outermost(product, size, k, basis, state.dtype, tol, max_iter)
    except _NotFinite:
        if nan_policy == 'raise':
            raise ValueError(
                'the Jacobian of func at state holds NaN or Inf, so SI is not defined'
            ) from None
        return float('nan')
    return float(np.abs(real).max())


class _NotFinite(Exception):
    pass


def _outermost(product, size, k, basis, dtype, tol, max_iter) -> np.ndarray:
    """Real parts of the k rightmost and the k leftmost eigenvalues."""
    # A fixed start makes the result reproducible; a zero Jacobian stops ARPACK with an error.
    start = np.random.default_rng(0).standard_normal(size)
    if not product(start).any():
        return np.zeros(1)
    options = dict(
        k=k,
        ncv=basis,
        v0=start,
        tol=max(1e-10, 2 * torch.finfo(dtype).eps) if tol is None else tol,
        maxiter=1000 if max_iter is None else max_iter,
        return_eigenvectors=False,
    )
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        values = [eigs(operator, which=which, **options) for which in ('LR', 'SR')]
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f'the eigenvalues did not converge in {options["maxiter"]} restarts: '
            f'raise max_iter or k (now {k}), or accept a larger tol (now {options["tol"]:.1e})'
        ) from error
    return np.concatenate(values).real


def _describe(value) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
