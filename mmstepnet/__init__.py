"""Attention as a learned step size: StepNet and network stiffness on MMEngine.

Importing the package checks the versions of what it runs with, makes ``mmstepnet::`` configs known
to MMEngine and lets torch's safe loader read MMEngine's checkpoints. It imports neither mmdet nor
mmcv nor mmpretrain: the registries do so when something is built.
"""

from mmengine.config.utils import MODULE2PACKAGE

from . import registry
from .utils.compat import check_versions
from .utils.safe_globals import allow_mmengine_checkpoints
from .version import __version__

check_versions()
allow_mmengine_checkpoints()

# MMEngine looks this name up as a distribution and joins its location with the package's name,
# which for an editable install points at nothing. For a name that is no distribution it asks the
# import system for the module's folder, which is right for every kind of install.
MODULE2PACKAGE['mmstepnet'] = 'mmstepnet.version'

__all__ = ['__version__', 'registry']
