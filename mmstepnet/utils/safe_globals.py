"""What mmengine's checkpoints hold besides tensors, made known to torch's safe loader.

``torch.load`` unpickles nothing but tensors and plain Python types (``weights_only=True``, the
default since torch 2.6). mmengine writes its message hub into every checkpoint: ``HistoryBuffer``
objects with numpy arrays inside. Without an entry for them, no run can be resumed. The entries
below are types that hold numbers; none of them runs code of the file's choice.
"""

import codecs
import pickle

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

# numpy's type codes: bool, integers, floats, complex numbers, bytes and strings.
_DTYPES = '?bhilqBHILQefdFDSU'
_STATISTICS = ('min', 'max', 'current', 'mean')


def history_buffer_method(owner, name):
    """Stands in for ``getattr``, by which a pickled ``HistoryBuffer`` names its own methods.

    Args:
        owner (type): Must be ``HistoryBuffer``.
        name (str): One of its statistics: ``'min'``, ``'max'``, ``'current'``, ``'mean'``.

    Returns:
        Callable: The method.

    Raises:
        pickle.UnpicklingError: Anything else is asked for. The general ``getattr`` would let a
            crafted file walk from an allowed object to one that is not.
    """
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise pickle.UnpicklingError(
            f'checkpoint asks for attribute {name!r} of {owner!r}; only the statistics '
            f'{", ".join(_STATISTICS)} of HistoryBuffer may be looked up'
        )
    return getattr(HistoryBuffer, name)


def allow_mmengine_checkpoints():
    """Adds to the safe loader's list what checkpoints of mmengine's runner hold.

    The safe loader stays on. Calling it again changes nothing.
    """
    reconstruct = np.empty(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    allowed = [HistoryBuffer, np.ndarray, np.dtype, codecs.encode]
    allowed += [type(np.dtype(code)) for code in _DTYPES]
    # numpy 2 moved these functions; a file names them as the numpy that wrote it did.
    for module in ('numpy._core.multiarray', 'numpy.core.multiarray'):
        allowed += [(reconstruct, f'{module}._reconstruct'), (scalar, f'{module}.scalar')]
    allowed += [
        (history_buffer_method, f'{module}.getattr') for module in ('builtins', '__builtin__')
    ]
    torch.serialization.add_safe_globals(allowed)
