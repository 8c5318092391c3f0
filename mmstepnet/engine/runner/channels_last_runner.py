"""A runner whose model computes on maps that keep their channels last in memory."""

import torch
from mmengine.runner import Runner
from torch import Tensor, nn

from mmstepnet.registry import RUNNERS


@RUNNERS.register_module()
class ChannelsLastRunner(Runner):
    """MMEngine's runner with the model in ``torch.channels_last``.

    Set ``runner_type = 'mmstepnet.ChannelsLastRunner'`` in a config. Weights of 2-D convolutions
    change their layout and nothing else: convolutions hand the layout on to the maps behind them,
    checkpoints load and save as ever, results agree to rounding. Initial weights of the same seed
    are others: random numbers are filled in by memory.
    """

    def build_model(self, model: nn.Module | dict) -> nn.Module:
        """As :meth:`mmengine.runner.Runner.build_model`, in ``torch.channels_last``."""
        if self.cfg.get('sync_bn') == 'mmcv':
            # Its norms are put in later, and read memory as if channels came first.
            raise ValueError("sync_bn='mmcv' does not know channels_last: take sync_bn='torch'")
        # Before the model is wrapped: DistributedDataParallel lays its buckets out by the weights.
        return to_channels_last(super().build_model(model))


_CALLS_OPS = ('TOODHead',)


def to_channels_last(model: nn.Module) -> nn.Module:
    """Turn a model to ``torch.channels_last``, in place, but for MMCV's own ops.

    RoIAlign, deformable convolutions and others read memory as if channels came first, without
    looking. Their layers keep that layout and get their inputs in it.

    Args:
        model: Any model.

    Returns:
        nn.Module: The same model.

    Raises:
        ValueError: A part of it calls such an op itself (TOOD's head), not by a layer.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in _CALLS_OPS:
            raise ValueError(
                f'{name or type(module).__name__} calls ops of MMCV that do not know '
                'channels_last: leave runner_type out of the config'
            )
    model.to(memory_format=torch.channels_last)
    for module in model.modules():
        if any(cls.__module__.startswith('mmcv.ops') for cls in type(module).__mro__):
            module.to(memory_format=torch.contiguous_format)
            module.register_forward_pre_hook(_channels_first, with_kwargs=True)
    return model


def _channels_first(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    def contiguous(value):
        return value.contiguous() if isinstance(value, Tensor) else value

    return tuple(map(contiguous, args)), {key: contiguous(v) for key, v in kwargs.items()}
