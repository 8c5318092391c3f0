"""Which versions of torch and of the OpenMMLab packages this package runs with.

Standard library alone: ``tools/install.py`` reads this file before anything is installed.
"""

import importlib.metadata
import importlib.util
import re
import runpy
import sys
import warnings
from pathlib import Path

# Module: the lowest version that works, the first one that has not been tried, what pip installs.
# The ranges hold for the forks too, which keep the modules' names and version lines.
SUPPORTED = {
    'torch': ('2.6', '2.14', 'torch==2.11.0 torchvision==0.26.0'),
    'mmengine': ('0.10.7', '0.11', 'mmengine==0.10.7'),
    'mmcv': ('2.1.0', '2.4', '--no-build-isolation mmcv==2.1.0'),
    'mmdet': ('3.3.0', '3.6', 'mmdet==3.3.0'),
    'mmpretrain': ('1.2.0', '1.4', 'mmpretrain==1.2.0'),
}

# What pip installs where a module comes from its fork: the upstream package would overwrite it.
FORKS = {
    'mmengine': 'onedl-mmengine==0.10.12',
    'mmcv': '--no-build-isolation onedl-mmcv==2.3.6',
    'mmdet': 'onedl-mmdetection==3.5.1',
    'mmpretrain': 'onedl-mmpretrain==1.3.6',
}


def release(version):
    """The numbers of a version, comparable: ``(2, 11, 0)`` of ``'2.11.0+cu130'``."""
    numbers = re.match(r'\d+(\.\d+)*', version)
    if numbers is None:
        raise ValueError(f'version must begin with a number, got {version!r}')
    parts = [int(part) for part in numbers[0].split('.')]
    return tuple(parts + [0] * (3 - len(parts)))


def installed_version(module):
    """Version of a module, without importing it.

    The ``version.py`` that torch and every OpenMMLab package carry is run on its own. Asking for
    the distribution's version instead would need the distribution's name, which the forks change.

    Args:
        module (str): Name of a top-level module.

    Returns:
        str | None: Its ``__version__``; None where the module is not installed or has no
            ``version.py``.
    """
    if module in sys.modules:
        return getattr(sys.modules[module], '__version__', None)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name('version.py')
    if not version_file.is_file():
        return None
    return runpy.run_path(str(version_file)).get('__version__')


def tried_arguments(module, arguments):
    """pip's arguments for the version of a module that this package was tried with.

    Args:
        module (str): Name of a top-level module.
        arguments (str): Those of the upstream package.

    Returns:
        str: Those of the module's fork where the fork is installed, or else ``arguments``.
    """
    fork = FORKS.get(module)
    if fork:
        try:
            importlib.metadata.version(fork.split()[-1].partition('==')[0])
            return fork
        except importlib.metadata.PackageNotFoundError:
            pass
    return arguments


def check_versions(supported=None):
    """Refuses modules that are too old and warns of those that are newer than any tried.

    A module that is not installed is passed over: classification needs no mmdet, and the stiffness
    functions need torch, numpy and scipy alone.

    Args:
        supported (dict | None): (floor, ceiling, pip arguments) of each module; the package's own
            table by default.

    Raises:
        ImportError: A module is below its floor. The message holds the pip command that mends it.
    """
    for module, (floor, ceiling, upstream) in (supported or SUPPORTED).items():
        version = installed_version(module)
        if version is None:
            continue
        if release(version) < release(floor):
            raise ImportError(
                f'mmstepnet needs {module} >= {floor}, found {version}. '
                f'Install it by: pip install {tried_arguments(module, upstream)}'
            )
        if release(version) >= release(ceiling):
            warnings.warn(
                f'mmstepnet has not been tried with {module} {version}, only with versions below '
                f'{ceiling}. If something fails: pip install {tried_arguments(module, upstream)}'
            )
