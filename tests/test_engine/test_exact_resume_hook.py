import random

import numpy as np
import torch

from mmstepnet.engine.hooks.exact_resume_hook import keep_worker_seed


def test_workers_of_several_processes_draw_different_numbers(monkeypatch):
    """Also where they start with equal seeds, as those of an iteration-based training do."""

    def drawn(rank):
        monkeypatch.setenv('RANK', str(rank))
        # What torch does before it calls the function.
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        keep_worker_seed(0)
        return random.random(), np.random.rand(), torch.rand(()).item()

    ranks = [drawn(rank) for rank in range(3)]
    assert all(len(set(numbers)) == 3 for numbers in zip(*ranks, strict=True))
    assert ranks == [drawn(rank) for rank in range(3)]
