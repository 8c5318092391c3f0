"""Backbones, registered in scope ``mmstepnet``."""

from .attention_conv_net import AttentionConvNet
from .information_propagation_net import InformationPropagationNet
from .on_mmpretrain import MetricVisionTransformer, StepVisionTransformer
from .step_resnet import StepResNet
from .step_resnet_cifar import StepResNetCifar

__all__ = [
    'AttentionConvNet',
    'InformationPropagationNet',
    'MetricVisionTransformer',
    'StepResNet',
    'StepResNetCifar',
    'StepVisionTransformer',
]
