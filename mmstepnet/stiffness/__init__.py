"""How stiff a network's feature trajectory is: plain torch, for any residual network."""

from .correlation import Correlation, Correlations, rank_correlation, step_size_correlation
from .indices import neural_stiffness_index, stiffness_aware_index
from .jacobian import stiffness_index
from .recorder import TrajectoryRecorder
from .report import build_report, read_report, read_samples, write_report
from .total_stiffness import (
    TNS,
    stiffness_degree,
    stiffness_proportion,
    total_neural_stiffness,
)

__all__ = [
    'TNS',
    'Correlation',
    'Correlations',
    'TrajectoryRecorder',
    'build_report',
    'neural_stiffness_index',
    'rank_correlation',
    'read_report',
    'read_samples',
    'step_size_correlation',
    'stiffness_aware_index',
    'stiffness_degree',
    'stiffness_index',
    'stiffness_proportion',
    'total_neural_stiffness',
    'write_report',
]
