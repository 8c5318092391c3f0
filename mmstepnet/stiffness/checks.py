"""Checks that the functions of this package share, so that they all speak the same way."""

import numpy as np
import torch
from torch import Tensor

NAN_POLICIES = ('raise', 'omit')


def check_nan_policy(nan_policy: str) -> None:
    """Raise ValueError unless ``nan_policy`` is ``'raise'`` or ``'omit'``."""
    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy must be 'raise' or 'omit', got {nan_policy!r}")


def to_float64(name: str, value: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return ``value`` in float64 with its graph, or say which argument is not a real tensor.

    Raises:
        TypeError: complex or boolean values.
        ValueError: a number of dimensions not in ``dims``, or nothing in it.
    """
    value = _to_tensor(name, value)
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f'{name} must hold real numbers, got {value.dtype}')
    if value.dim() not in dims:
        allowed = ' or '.join(map(str, dims))
        raise ValueError(f'{name} must have {allowed} dimensions, got shape {tuple(value.shape)}')
    if value.numel() == 0:
        raise ValueError(f'{name} is empty: shape {tuple(value.shape)}')
    return value.double()


def _to_tensor(name: str, value) -> Tensor:
    try:
        # By way of NumPy, since torch would round a list's numbers to float32.
        return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises each, for other contents
        raise TypeError(
            f'{name} must be a tensor or what becomes one, got {value!r:.60}: {error}'
        ) from error


def check_nsi(nsi: Tensor, stages: Tensor, nan_policy: str) -> tuple[Tensor, Tensor, Tensor]:
    """Check a table of NSI values and its stage labels.

    Args:
        nsi: (N, L), one row a sample, one column a recorded block.
        stages: (L,) integers, the stage of each block.
        nan_policy: ``'raise'`` or ``'omit'``.

    Returns:
        The finite rows in float64 (M, L), the labels (L,), and which rows those are (N,) bool.

    Raises:
        TypeError: stage labels that are not integers.
        ValueError: wrong shapes, nothing recorded, a negative value, NaN or Inf with
            ``nan_policy='raise'`` (named by sample and block), or no row left with ``'omit'``.
    """
    check_nan_policy(nan_policy)
    nsi = to_float64('nsi', nsi, dims=(2,))
    stages = _to_tensor('stages', stages).to(nsi.device)
    if stages.is_floating_point() or stages.is_complex() or stages.dtype == torch.bool:
        raise TypeError(f'stages must hold integers, got {stages.dtype}')
    if stages.shape != nsi.shape[1:]:
        raise ValueError(
            f'stages must have one label for each of the {nsi.shape[1]} blocks of nsi, '
            f'got shape {tuple(stages.shape)}'
        )
    finite = nsi.detach().isfinite()
    keep = finite.all(dim=1)
    if not keep.all():
        if nan_policy == 'raise':
            sample, block = (~finite).nonzero()[0].tolist()
            raise ValueError(
                f'nsi of sample {sample}, block {block} is {nsi[sample, block].item()}; '
                "nan_policy='omit' leaves such samples out"
            )
        if not keep.any():
            raise ValueError('nsi holds no sample without NaN or Inf: nothing is left to measure')
        nsi = nsi[keep]
    if (nsi.detach() < 0).any():
        raise ValueError('nsi is a quotient of norms and cannot be negative')
    return nsi, stages, keep
