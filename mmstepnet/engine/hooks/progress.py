"""How far a training is, for hooks that also run without one."""

from mmengine.runner import BaseLoop, IterBasedTrainLoop, Runner


def train_loop(runner: Runner) -> BaseLoop | None:
    """The training that a validation belongs to. ``runner.train_loop`` would build one."""
    loop = runner._train_loop
    return loop if isinstance(loop, BaseLoop) else None


def steps_done(loop: BaseLoop) -> tuple[str, int]:
    """What a training counts, ``'iter'`` or ``'epoch'``, and how many of it are done."""
    return ('iter', loop.iter) if isinstance(loop, IterBasedTrainLoop) else ('epoch', loop.epoch)
