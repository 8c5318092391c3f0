"""Layers of the papers."""

from .iebn import IEBN
from .metric_attention import MetricAttention
from .residual_step import ResidualStep

__all__ = ['IEBN', 'MetricAttention', 'ResidualStep']
