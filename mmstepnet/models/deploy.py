"""Deployment of a whole model: what is constant in evaluation is folded into the layers before."""

from mmcv.cnn import fuse_conv_bn
from mmengine.logging import print_log
from torch import nn

from .backbones.base import ResidualBackbone
from .backbones.blocks import not_foldable


def switch_to_deploy(model: nn.Module) -> nn.Module:
    """Fold step sizes and batch norms of a model in evaluation mode, in place.

    Each module that knows how (backbones of this package, :class:`StepNetAdaptor` in any other
    model) folds itself. Batch norms behind convolutions elsewhere, in necks and heads, are folded
    by MMCV, except in a part that uses one convolution with several norms, standardises its
    weights or has norms in front. Outputs stay equal up to rounding, a second call changes
    nothing. The state dict has other keys afterwards: a folded checkpoint loads into a model that
    has been switched.

    Args:
        model: A detector, a classifier, a backbone or a part of one.

    Returns:
        nn.Module: The same model.

    Raises:
        RuntimeError: The model or a part of it is in training mode.
    """
    if any(module.training for module in model.modules()):
        raise RuntimeError('switch_to_deploy() needs evaluation mode: call eval() first')
    for module in list(model.modules()):
        if hasattr(module, 'switch_to_deploy'):
            module.switch_to_deploy()
    _fold_norms(model)
    # What took the place of norms is new and in training mode.
    model.eval()
    return model


def _fold_norms(module: nn.Module) -> None:
    # A backbone knows its pairs of convolution and norm; MMCV goes by the order of registration.
    if isinstance(module, ResidualBackbone):
        return
    if any(isinstance(part, ResidualBackbone) for part in module.modules()):
        for child in module.children():
            _fold_norms(child)
    elif reason := not_foldable(module):
        print_log(f'{type(module).__name__} {reason}; its norms stay', logger='current')
    else:
        fuse_conv_bn(module)
