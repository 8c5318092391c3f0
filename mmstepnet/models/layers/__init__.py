"""Layers of the papers."""

from .residual_step import ResidualStep

__all__ = ['ResidualStep']
