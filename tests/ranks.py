"""A function on several processes of this machine that talk by gloo."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(function: Callable, world: int, folder: Path, *args) -> list:
    """What ``function(rank, *args)`` returns on each rank; what one of them raises is raised here.

    Args:
        function: Importable, and returns what ``torch.load`` takes without trust.
        world: Number of processes.
        folder: Empty folder for results.
        *args: What can be pickled.
    """
    mp.spawn(_run_rank, (function, world, folder, args), nprocs=world)
    return [torch.load(folder / f'{rank}.pt') for rank in range(world)]


def _run_rank(rank, function, world, folder, args):
    torch.set_num_threads(1)
    store = f'file://{folder}/store'
    dist.init_process_group('gloo', init_method=store, rank=rank, world_size=world)
    try:
        torch.save(function(rank, *args), folder / f'{rank}.pt')
        dist.barrier()
    finally:
        dist.destroy_process_group()
