"""Backbones, registered in scope ``mmstepnet``."""

from .step_resnet import StepResNet

__all__ = ['StepResNet']
