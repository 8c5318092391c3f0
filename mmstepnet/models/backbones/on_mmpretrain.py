"""Backbones that extend MMPretrain's, imported when the first one is built.

The rest of the package works without MMPretrain. MMEngine's registries take functions as well as
classes, so a config doesn't see the difference.
"""

from torch import nn

from mmstepnet.registry import MODELS


@MODELS.register_module()
def MetricVisionTransformer(*args, **kwargs) -> nn.Module:
    """Build :class:`mmstepnet.models.backbones.metric_vit.MetricVisionTransformer`.

    Raises:
        ImportError: MMPretrain is not installed.
    """
    try:
        from .metric_vit import MetricVisionTransformer as Backbone
    except ModuleNotFoundError as error:
        raise ImportError(
            f'MetricVisionTransformer extends a backbone of MMPretrain, but {error.name} is not '
            'installed: pip install "mmpretrain==1.2.0"'
        ) from error
    return Backbone(*args, **kwargs)
