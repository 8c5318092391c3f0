"""A runner whose model computes on maps that keep their channels last in memory."""

import torch
from mmengine.runner import Runner
from torch import nn

from mmstepnet.registry import RUNNERS


@RUNNERS.register_module()
class ChannelsLastRunner(Runner):
    """MMEngine's runner with the model in ``torch.channels_last``.

    Set ``runner_type = 'mmstepnet.ChannelsLastRunner'`` in a config. Weights of 2-D convolutions
    change their layout and nothing else: convolutions hand the layout on to the maps behind them,
    checkpoints load and save as ever, results agree to rounding.
    """

    def build_model(self, model: nn.Module | dict) -> nn.Module:
        """As :meth:`mmengine.runner.Runner.build_model`, in ``torch.channels_last``."""
        # Before the model is wrapped: DistributedDataParallel lays its buckets out by the weights.
        return super().build_model(model).to(memory_format=torch.channels_last)
