"""Attention modules as the ``dt`` of ``x + f(x) * dt``, registered in scope ``mmstepnet``."""

from mmstepnet.registry import MODELS

from .base import StepSize
from .stepnet import StepNetAdaptor

for _step_size in (StepNetAdaptor,):
    MODELS.register_module(module=_step_size)

__all__ = ['StepNetAdaptor', 'StepSize']
