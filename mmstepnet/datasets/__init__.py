"""Data sets and what checks them."""

from .check_coco import Problem, check_coco
from .digits import Digits

__all__ = ['Digits', 'Problem', 'check_coco']
