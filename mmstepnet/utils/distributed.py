"""Process groups for the command line tools: NCCL on GPUs, gloo where there is none."""

import argparse
import contextlib
import datetime
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import init_dist
from mmengine.utils.dl_utils import set_multi_processing
from torch import distributed

from .command_line import fail, wait_for_the_end

LAUNCHERS = ('none', 'pytorch', 'slurm', 'mpi')
_LOST_PEER = ('Connection closed by peer', 'Connection reset by peer', 'Broken pipe')
_TIMED_OUT = ('Timed out waiting', 'Application timeout caused pair closure')
_TIMEOUT = 1800  # seconds that a process waits for another, torch's own default for gloo
_ANSWER_SECONDS = 5  # how far apart two processes notice that a third one hangs
_LOOPBACK = ('127.0.0.1', 'localhost', '::1')


class _LocalRankAction(argparse.Action):
    # Launchers that name the process by an argument; one that sets the variable too is right.
    def __call__(self, parser, namespace, value, option_string=None):
        os.environ.setdefault('LOCAL_RANK', str(value))


def add_launcher_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--launcher``, and ``--local_rank`` for launchers that give it."""
    parser.add_argument(
        '--launcher', choices=LAUNCHERS, default='none', help='what starts the processes'
    )
    parser.add_argument(
        *('--local_rank', '--local-rank'),
        type=int,
        action=_LocalRankAction,
        help=argparse.SUPPRESS,
    )


def set_rank_variables(launcher: str) -> None:
    """Bring what the launcher says of this process into torch's RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT.

    Args:
        launcher: One of ``LAUNCHERS``. Ends the process where its variables are missing.
    """
    env = os.environ
    if launcher == 'none':
        # Whatever a shell has kept from another launcher.
        env['LOCAL_RANK'] = '0'
        return
    names = {
        'pytorch': ('RANK', 'LOCAL_RANK', 'WORLD_SIZE'),
        'slurm': ('SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NTASKS'),
        'mpi': (
            'OMPI_COMM_WORLD_RANK',
            'OMPI_COMM_WORLD_LOCAL_RANK',
            'OMPI_COMM_WORLD_SIZE',
        ),
    }[launcher]
    missing = [name for name in names if name not in env]
    if missing:
        starter = {
            'pytorch': 'tools/dist_train.sh or tools/dist_test.sh',
            'slurm': 'tools/slurm_train.sh or tools/slurm_test.sh',
            'mpi': 'mpirun',
        }[launcher]
        fail(f'--launcher {launcher} without {", ".join(missing)}: start it by {starter}')
    env['RANK'], env['LOCAL_RANK'], env['WORLD_SIZE'] = (env[name] for name in names)
    if launcher == 'slurm':
        # Keeps the ports of two jobs on one machine apart, and of two steps of one job.
        job, step = (int(env.get(f'SLURM_{name}', 0)) for name in ('JOB_ID', 'STEP_ID'))
        env.setdefault('MASTER_PORT', str(20000 + (job + 101 * step) % 20000))
        env.setdefault('MASTER_ADDR', _first_slurm_host())
    env.setdefault('MASTER_ADDR', '127.0.0.1')
    env.setdefault('MASTER_PORT', '29500')


def _first_slurm_host() -> str:
    if os.environ.get('SLURM_NNODES', '1') == '1':
        return '127.0.0.1'
    nodes = os.environ['SLURM_NODELIST']
    hosts = subprocess.run(
        ['scontrol', 'show', 'hostnames', nodes], capture_output=True, text=True, check=True
    )
    return hosts.stdout.split()[0]


@contextlib.contextmanager
def process_group(launcher: str, cfg: Config) -> Iterator[None]:
    """The process group of a run, from its start to its end, whatever happens in between.

    Without a GPU the group is gloo's and the config's model wrapper is set to what DDP needs there.
    Returns when all processes have come this far, so that nothing is written before the checks of
    all of them have passed.

    Args:
        launcher: One of ``LAUNCHERS``.
        cfg: The whole config; ``env_cfg.dist_cfg`` holds backend and timeout (in seconds).
    """
    if launcher != 'none':
        _init(launcher, cfg)
    try:
        yield
    except KeyboardInterrupt:
        _destroy()
        print('\ninterrupted; train.py --resume goes on from the last checkpoint', file=sys.stderr)
        raise SystemExit(130) from None
    except RuntimeError as error:
        timed_out = any(text in str(error) for text in _TIMED_OUT)
        if not timed_out and not any(text in str(error) for text in _LOST_PEER):
            _destroy()
            raise
        silent = _silent_processes()
        _destroy()
        if timed_out and global_rank() == min(set(range(world_size())) - set(silent)):
            _tell_who_hangs(silent, cfg)
        # The launcher names a process that died. This one only lost its partner.
        wait_for_the_end()
    except BaseException:
        _destroy()
        raise
    _destroy(finished=True)


def _init(launcher: str, cfg: Config) -> None:
    env_cfg = cfg.get('env_cfg', {})
    dist_cfg = dict(env_cfg.get('dist_cfg', {}))
    set_multi_processing(**env_cfg.get('mp_cfg', {}), distributed=True)
    if get_device() != 'cpu':
        init_dist(launcher, **dist_cfg)
        return
    if os.environ['MASTER_ADDR'] in _LOOPBACK:
        # Otherwise gloo asks for the address of the machine's name, which not every machine has.
        os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo0' if sys.platform == 'darwin' else 'lo')
    timeout = datetime.timedelta(seconds=dist_cfg.get('timeout', _TIMEOUT))
    distributed.init_process_group('gloo', timeout=timeout)
    wrapper = dict(
        type='MMDistributedDataParallel',
        broadcast_buffers=False,
        find_unused_parameters=cfg.get('find_unused_parameters', False),
    )
    wrapper.update(cfg.get('model_wrapper_cfg') or {})
    cfg.model_wrapper_cfg = dict(wrapper, device_ids=None)


def _silent_processes() -> list[int]:
    """Processes that have not come here too: all that can still run do, when one hangs or dies."""
    try:
        store = distributed.TCPStore(
            os.environ['MASTER_ADDR'],
            int(os.environ['MASTER_PORT']),
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_ANSWER_SECONDS),
        )
    except RuntimeError:
        return [0]  # without an elastic launcher the store ends with process 0
    store = distributed.PrefixStore('mmstepnet/answers', store)
    store.set(str(global_rank()), 'here')
    time.sleep(_ANSWER_SECONDS)
    return [rank for rank in range(world_size()) if not store.check([str(rank)])]


def _tell_who_hangs(silent: list[int], cfg: Config) -> None:
    timeout = cfg.get('env_cfg', {}).get('dist_cfg', {}).get('timeout', _TIMEOUT)
    who = ', '.join(map(str, silent))
    print(
        f'error: process {who} hangs: the others waited {timeout} s for it '
        '(env_cfg.dist_cfg.timeout); --resume goes on from the last checkpoint'
        if silent
        else f'error: every process waited {timeout} s for another (env_cfg.dist_cfg.timeout): '
        'they have not run the same steps',
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(1)


def _destroy(finished: bool = False) -> None:
    # A gloo group left to the interpreter's exit can abort the process, and a model wrapped for it
    # keeps it alive: what the caller has let go of must be gone before. NCCL's is destroyed only
    # after a good end: after an error its destruction waits for processes that no longer answer.
    gc.collect()
    if distributed.is_initialized() and (finished or distributed.get_backend() == 'gloo'):
        distributed.destroy_process_group()


def global_rank() -> int:
    """Number of this process among all."""
    return int(os.environ.get('RANK', 0))


def world_size() -> int:
    """Number of processes that the launcher started, known before there is a group."""
    return int(os.environ.get('WORLD_SIZE', 1))


def has_gpu() -> bool:
    """Whether CUDA is usable here."""
    return torch.cuda.is_available()
