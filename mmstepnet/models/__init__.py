"""Step sizes, layers and backbones; none needs mmdet, mmpretrain or compiled ops."""

from .backbones import *  # noqa: F403
from .layers import *  # noqa: F403
from .step_sizes import *  # noqa: F403
