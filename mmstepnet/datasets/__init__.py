"""Data sets and what checks them."""

from .check_coco import Problem, check_coco
from .digits import Digits
from .stl10 import STL10

__all__ = ['STL10', 'Digits', 'Problem', 'check_coco']
