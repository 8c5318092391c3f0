"""Randomness that a resumed run shares with the one that was never interrupted."""

import random

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop

from mmstepnet.registry import FUNCTIONS, HOOKS


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Make random numbers a function of seed, epoch and process, not of what was drawn before.

    MMEngine's checkpoints hold no state of the random number generators, so a resumed run draws
    other augmentations, dropout masks and region samples than the same run without a break. This
    hook seeds Python, numpy and torch anew when an epoch starts (in an iteration-based loop: before
    each training step). Nothing has to be stored, and a run killed at any moment ends with the
    weights that it would have had, as far as the operators themselves are deterministic.

    Workers of the data loader take their seeds from torch's generator when they start. So they must
    start with the epoch: ``persistent_workers=False``, and
    ``worker_init_fn=dict(type='mmstepnet.keep_worker_seed')`` in place of MMEngine's own function,
    which would give them the same seed in every epoch. ``tools/train.py`` sets both.

    In an iteration-based loop without workers, random transforms are not covered: MMEngine replays
    the data of the iterations already done without a call to any hook.

    The number of processes and the batch size go into the checkpoint's ``meta``, for ``--resume``
    to compare.
    """

    priority = 'VERY_HIGH'

    def before_train_epoch(self, runner) -> None:
        self._seed(runner, runner.epoch)

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            self._seed(runner, runner.epoch, runner.iter)

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        checkpoint['meta'].update(
            world_size=runner.world_size,
            batch_size=runner.train_dataloader.batch_sampler.batch_size,
        )

    @staticmethod
    def _seed(runner, *counters: int) -> None:
        sequence = np.random.SeedSequence([runner.seed, runner.rank, *counters])
        for_python, for_numpy, for_torch = map(int, sequence.generate_state(3))
        random.seed(for_python)
        np.random.seed(for_numpy)
        torch.manual_seed(for_torch)


@FUNCTIONS.register_module()
def keep_worker_seed(worker_id: int) -> None:
    """A ``worker_init_fn`` that leaves a data worker the seeds that torch has just given it.

    torch draws them for Python, numpy and itself from the main process's generator, so they differ
    from epoch to epoch and follow from the seed that :class:`ExactResumeHook` has set.
    """
