"""Backbones, registered in scope ``mmstepnet``."""

from .step_resnet import StepResNet
from .step_resnet_cifar import StepResNetCifar

__all__ = ['StepResNet', 'StepResNetCifar']
