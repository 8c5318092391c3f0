"""``mmstepnet::FOLDER/NAME.py`` as a config's ``_base_``."""

from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE

_SCOPE = 'mmstepnet'


def allow_external_configs() -> None:
    """Let MMEngine find this package's configs, and read them as it reads any base file."""
    # MMEngine looks this name up as a distribution and joins its location with the package's name,
    # which for an editable install points at nothing. For a name that is no distribution it asks
    # the import system for the module's folder, which is right for every kind of install.
    MODULE2PACKAGE[_SCOPE] = 'mmstepnet.version'
    Config._get_cfg_path = staticmethod(_get_cfg_path)


_find = Config._get_cfg_path


def _get_cfg_path(cfg_path: str, filename: str) -> tuple[str, str | None]:
    # MMEngine would look up every type of such a config in this package's scope. Its configs are
    # written for MMDetection's or MMPretrain's, by the `default_scope` that they set.
    path, scope = _find(cfg_path, filename)
    return path, None if scope == _SCOPE else scope
