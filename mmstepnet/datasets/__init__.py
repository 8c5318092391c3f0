"""Data sets and what checks them."""

from .check_coco import Problem, check_coco

__all__ = ['Problem', 'check_coco']
