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

_MAX_RESTARTS = 1000


def stiffness_index(
    func: Callable[[Tensor], Tensor],
    state: Tensor,
    k: int = 6,
    tol: float | None = None,
    dense_below: int = 512,
    nan_policy: str = 'raise',
) -> float:
    r"""SI of ``func`` at ``state``, :math:`\max_i |\Re \lambda_i(J)|`, without building J.

    The k eigenvalues of largest and the k of smallest real part are computed matrix-free. A state
    with fewer than ``dense_below`` elements gets its Jacobian built column by column and all
    eigenvalues taken: no dearer there, and certain. The same happens where the Krylov basis of
    ``max(4 k, 40)`` vectors would fill the space, since ARPACK cannot run then.

    Arnoldi iteration sees large eigenvalues first. Where imaginary parts are hundreds of times as
    large as all real parts, it may stop at a pair that is not the outermost; a larger ``k`` helps.

    Args:
        func: A vector field that returns the shape it gets and has forward-mode derivatives. A
            network must be in evaluation mode: BN in training mode has no Jacobian of its own. A
            batch of states has a block-diagonal Jacobian, so its SI is the largest of its samples.
        state: Any shape; the point where the Jacobian is taken. Products are computed in its dtype,
            the iteration in float64: give float64 (and ``module.double()``) for more than about
            five digits.
        k: How many eigenvalues to look for at each end. More is slower and safer.
        tol: Relative accuracy of the eigenvalues; 1e-10 in float64, by default 1e-4 in what is
            coarser, where rounding keeps the iteration from seeing more.
        dense_below: Size under which the Jacobian is built.
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
    size = state.numel()
    # Inference mode drops tangents without a word; a clone outside of it is no inference tensor.
    with torch.inference_mode(False):
        state = state.detach().clone()

    @torch.inference_mode(False)
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
    if tol is None:
        tol = 1e-10 if state.dtype == torch.float64 else 1e-4
    try:
        if size < dense_below or size <= basis:
            identity = np.eye(size)
            jacobian = np.stack([product(column) for column in identity], axis=1)
            real = np.linalg.eigvals(jacobian).real
        else:
            real = _outermost(product, size, k, basis, tol)
    except _NotFinite:
        if nan_policy == 'raise':
            raise ValueError(
                'the Jacobian of func at state holds NaN or Inf, so SI is not defined'
            ) from None
        return float('nan')
    return float(np.abs(real).max())


class _NotFinite(Exception):
    pass


def _outermost(product, size, k, basis, tol) -> np.ndarray:
    """Real parts of the k rightmost and the k leftmost eigenvalues."""
    # A fixed start makes the result reproducible; a zero Jacobian stops ARPACK with an error.
    start = np.random.default_rng(0).standard_normal(size)
    if not product(start).any():
        return np.zeros(1)
    options = dict(
        k=k,
        ncv=basis,
        v0=start,
        tol=tol,
        maxiter=_MAX_RESTARTS,
        return_eigenvectors=False,
    )
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        values = [eigs(operator, which=which, **options) for which in ('LR', 'SR')]
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f'the eigenvalues did not converge in {_MAX_RESTARTS} restarts: '
            f'raise k (now {k}) or tol (now {tol:.1e})'
        ) from error
    return np.concatenate(values).real


def _describe(value) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
