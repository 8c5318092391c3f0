"""Randomness that a resumed run shares with the one that was never interrupted."""

import os
import random

import numpy as np
import torch
from mmengine.dist import broadcast_object_list
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop

from mmstepnet.registry import FUNCTIONS, HOOKS
from mmstepnet.utils.training_logs import read_log

from .progress import steps_done


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

    A checkpoint is written before its evaluation. A run that was killed between the two makes up
    for it when it is resumed: the best checkpoint, and schedules that follow a metric, are then
    those of the run without a break.

    In an iteration-based loop MMEngine replays the data of the iterations already done without a
    call to any hook. Random transforms are the same after it where the data loader has workers and
    its sampler never ends (``InfiniteSampler``).

    The number of processes and the batch size go into the checkpoint's ``meta``, for ``--resume``
    to compare.
    """

    priority = 'VERY_HIGH'
    _begins = False

    def before_train(self, runner) -> None:
        self._begins = True

    def before_train_epoch(self, runner) -> None:
        if self._begins and self._evaluation_is_missing(runner):
            runner.logger.info('resumed behind a checkpoint that was not evaluated: it is now')
            runner.val_loop.run()
        self._begins = False
        self._seed(runner, runner.epoch)

    @staticmethod
    def _evaluation_is_missing(runner) -> bool:
        loop = runner.train_loop
        _, done = steps_done(loop)
        if not runner._resume or not done or runner.val_loop is None:
            return False
        if done < loop.val_begin or done % loop.val_interval:
            return False
        _, found = read_log(runner.work_dir)
        # Process 0 has written the log, maybe where others can't read it.
        answer = [done not in {line['step'] for line in found}]
        broadcast_object_list(answer)
        return answer[0]

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
        seed_all(runner.seed, runner.rank, *counters)


def seed_all(*numbers: int) -> None:
    """Seed Python, numpy and torch by a sequence of numbers."""
    states = np.random.SeedSequence(numbers).generate_state(3)
    for_python, for_numpy, for_torch = map(int, states)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


@FUNCTIONS.register_module()
def keep_worker_seed(worker_id: int) -> None:
    """A ``worker_init_fn`` that leaves a data worker the seeds that torch has just given it.

    torch draws them for Python, numpy and itself from the main process's generator, so they differ
    from epoch to epoch and follow from the seed that :class:`ExactResumeHook` has set. In an
    iteration-based loop workers start before that hook, all processes with the same generator: each
    but the first mixes its rank in.
    """
    rank = int(os.environ.get('RANK', 0))
    if rank:
        seed_all(torch.initial_seed(), rank)
