"""Metrics of an evaluation."""

from .stiffness_metric import Measurement, StiffnessMetric

__all__ = ['Measurement', 'StiffnessMetric']
