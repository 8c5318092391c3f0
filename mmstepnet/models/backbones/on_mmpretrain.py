"""Backbones that extend MMPretrain's, imported when the first one is built.

The rest of the package works without MMPretrain. MMEngine's registries take functions as well as
classes, so a config doesn't see the difference.
"""

from importlib import import_module

from torch import nn

from mmstepnet.registry import MODELS


@MODELS.register_module()
def MetricVisionTransformer(*args, **kwargs) -> nn.Module:
    """Build :class:`mmstepnet.models.backbones.metric_vit.MetricVisionTransformer`.

    Raises:
        ImportError: MMPretrain is not installed.
    """
    return _backbone('metric_vit', 'MetricVisionTransformer')(*args, **kwargs)


@MODELS.register_module()
def StepVisionTransformer(*args, **kwargs) -> nn.Module:
    """Build :class:`mmstepnet.models.backbones.step_vit.StepVisionTransformer`.

    Raises:
        ImportError: MMPretrain is not installed.
    """
    return _backbone('step_vit', 'StepVisionTransformer')(*args, **kwargs)


def _backbone(module: str, name: str) -> type[nn.Module]:
    try:
        return getattr(import_module(f'.{module}', __package__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{name} extends a backbone of MMPretrain, but {error.name} is not installed: '
            'pip install "mmpretrain==1.2.0"'
        ) from error
