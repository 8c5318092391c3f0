"""Layers of the papers."""

from .iebn import IEBN
from .metric_attention import MetricAttention
from .relative_attention import RelativeAttention2d, attention_from_conv
from .residual_step import ResidualStep, plain_steps

__all__ = [
    'IEBN',
    'MetricAttention',
    'RelativeAttention2d',
    'ResidualStep',
    'attention_from_conv',
    'plain_steps',
]
