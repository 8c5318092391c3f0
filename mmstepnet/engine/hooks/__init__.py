"""Hooks of MMEngine's runner."""

from .atomic_checkpoint_hook import AtomicCheckpointHook, AtomicLocalBackend
from .exact_resume_hook import ExactResumeHook, keep_worker_seed
from .head_figure_hook import HeadFigureHook
from .prediction_pictures_hook import PredictionPicturesHook
from .stiffness_hook import StiffnessHook

__all__ = [
    'AtomicCheckpointHook',
    'AtomicLocalBackend',
    'ExactResumeHook',
    'HeadFigureHook',
    'PredictionPicturesHook',
    'StiffnessHook',
    'keep_worker_seed',
]
