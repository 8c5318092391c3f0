"""Attention as a learned step size: StepNet and network stiffness on MMEngine.

Importing the package checks the versions of what it runs with, makes ``mmstepnet::`` configs known
to MMEngine and lets torch's safe loader read MMEngine's checkpoints. It imports neither mmdet nor
mmcv nor mmpretrain: the registries do so when something is built.
"""

from . import registry
from .utils.compat import check_versions
from .utils.external_configs import allow_external_configs
from .utils.safe_globals import allow_mmengine_checkpoints
from .version import __version__

check_versions()
allow_mmengine_checkpoints()
allow_external_configs()

__all__ = ['__version__', 'registry']
