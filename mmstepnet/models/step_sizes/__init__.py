"""Attention modules as the ``dt`` of ``x + f(x) * dt``, registered in scope ``mmstepnet``."""

from mmstepnet.registry import MODELS

from .base import StepSize
from .cbam import CBAM
from .dia import DIA
from .eca import ECA
from .fca import FCA
from .ie import IE
from .sem import SEM
from .sge import SGE
from .squeeze_excitation import SqueezeExcitation
from .srm import SRM
from .stepnet import StepNetAdaptor
from .stepnet_ablation import StepNetAblation

for _step_size in (
    CBAM,
    DIA,
    ECA,
    FCA,
    IE,
    SEM,
    SGE,
    SRM,
    SqueezeExcitation,
    StepNetAblation,
    StepNetAdaptor,
):
    MODELS.register_module(module=_step_size)

__all__ = [
    'CBAM',
    'DIA',
    'ECA',
    'FCA',
    'IE',
    'SEM',
    'SGE',
    'SRM',
    'SqueezeExcitation',
    'StepNetAblation',
    'StepNetAdaptor',
    'StepSize',
]
