"""Layers of the papers."""

from .iebn import IEBN
from .residual_step import ResidualStep

__all__ = ['IEBN', 'ResidualStep']
