"""What mmengine's checkpoints hold besides tensors, made known to torch's safe loader.

``torch.load`` unpickles nothing but tensors and plain Python types (``weights_only=True``, the
default since torch 2.6). mmengine writes its message hub into every checkpoint: ``HistoryBuffer``
objects with numpy arrays inside. Its one-cycle schedule writes the function that it anneals by.
Without an entry for them, no such run can be resumed. The entries below are types that hold numbers
and a few named functions; none of them runs code of the file's choice.
"""

import codecs
import pickle

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

# numpy's type codes: bool, integers, floats, complex numbers, bytes and strings.
_DTYPES = '?bhilqBHILQefdFDSU'
_STATISTICS = ('min', 'max', 'current', 'mean')
_ANNEALING = ('_annealing_cos', '_annealing_linear')


class _Annealing(type):
    def __getattr__(cls, name):
        if name not in _ANNEALING:
            raise AttributeError(name)
        from mmengine.optim import OneCycleParamScheduler

        return getattr(OneCycleParamScheduler, name)


class OneCycle(metaclass=_Annealing):
    """Stands in for MMEngine's ``OneCycleParamScheduler``, whose module is slow to import.

    Its annealing functions are attributes, since the forks' loader allows the general ``getattr``.
    """


def method(owner, name):
    """Stands in for ``getattr``, by which pickled objects name methods that they hold.

    Args:
        owner (type): ``HistoryBuffer``, or ``OneCycle`` for the one-cycle schedule.
        name (str): A statistic (``'min'``, ``'max'``, ``'current'``, ``'mean'``), or the way of
            annealing.

    Returns:
        Callable: The method.

    Raises:
        pickle.UnpicklingError: Anything else is asked for. The general ``getattr`` would let a
            crafted file walk from an allowed object to one that is not.
    """
    if owner is HistoryBuffer and name in _STATISTICS:
        return getattr(HistoryBuffer, name)
    if owner is OneCycle and name in _ANNEALING:
        return getattr(OneCycle, name)
    raise pickle.UnpicklingError(
        f'checkpoint asks for attribute {name!r} of {owner!r}; only the statistics '
        f'{", ".join(_STATISTICS)} of HistoryBuffer and the annealing of the one-cycle schedule '
        'may be looked up'
    )


def allow_mmengine_checkpoints():
    """Adds to the safe loader's list what checkpoints of mmengine's runner hold.

    The safe loader stays on. Calling it again changes nothing.
    """
    reconstruct = np.empty(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    allowed = [HistoryBuffer, np.ndarray, np.dtype, codecs.encode]
    allowed += [type(np.dtype(code)) for code in _DTYPES]
    # Named, since a `safe_globals` block ends by taking its entries off the list, also where they
    # were there before. The forks' loader has such a block with these types, but without names.
    allowed = [(item, f'{item.__module__}.{item.__qualname__}') for item in allowed]
    # numpy 2 moved these functions; a file names them as the numpy that wrote it did.
    for module in ('numpy._core.multiarray', 'numpy.core.multiarray'):
        allowed += [(reconstruct, f'{module}._reconstruct'), (scalar, f'{module}.scalar')]
    allowed += [(method, f'{module}.getattr') for module in ('builtins', '__builtin__')]
    allowed.append((OneCycle, 'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler'))
    torch.serialization.add_safe_globals(allowed)
