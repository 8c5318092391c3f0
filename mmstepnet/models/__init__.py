"""Step sizes, layers and backbones; none needs mmdet, mmpretrain or compiled ops."""

from .backbones import *  # noqa: F403
from .deploy import switch_to_deploy as switch_to_deploy
from .layers import *  # noqa: F403
from .step_sizes import *  # noqa: F403
