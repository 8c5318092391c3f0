"""Start one process per GPU by torch's elastic launcher; dist_train.sh and dist_test.sh call it.

    python tools/launch.py GPUS SCRIPT [ARGUMENT ...]

Environment: NNODES (1), NODE_RANK (0), MASTER_ADDR (127.0.0.1), PORT (29500; on one machine a free
one). Where there is no GPU, it starts GPUS processes on the CPU.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
import warnings
from typing import NoReturn

BAD_INPUT = 2  # exit code of a process that has already told the user what is wrong
NODES_SECONDS = 900  # how long the first machine waits for the others
_LAUNCHER_PID = 'MMSTEPNET_LAUNCHER_PID'


def prepare_process() -> None:
    """Settle what must be settled before torch is imported; train.py and test.py import this file
    first for that.

    OpenMP reads its variables when torch loads it. Its spinning threads can make processes that
    share cores many times slower; values set by the user win.

    A process started from here ends with its launcher, even one that was killed (on Linux), and on
    Ctrl-C at once: the launcher says that, and a traceback of every process would bury the line.
    """
    # Tools that import this file run from a checkout that isn't installed; it comes first.
    sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    os.environ.setdefault('MKL_NUM_THREADS', os.environ['OMP_NUM_THREADS'])
    os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
    # MMEngine's import of a module that setuptools 80 still has: nothing that a user could act on.
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
    if _LAUNCHER_PID not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == 'linux':
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.environ[_LAUNCHER_PID] != str(os.getppid()):
            raise SystemExit('the launcher is gone')
    # Data loaders' processes and what they start are not the launcher's.
    del os.environ[_LAUNCHER_PID]


def fail(message: str) -> NoReturn:
    print(f'error: {message}', file=sys.stderr, flush=True)
    raise SystemExit(BAD_INPUT)


def integer(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        fail(f'{name} must be a whole number of at least {least}, got {value!r}')
    return int(value)


def port_for(nnodes: int, node_rank: int) -> int:
    """The port of the first node's store: the given one if it is free, else any free one."""
    given = os.environ.get('PORT')
    if given is None and nnodes > 1:
        given = '29500'
    port = integer('PORT', given or '0', 0)
    if port > 65535:
        fail(f'PORT must be below 65536, got {port}')
    if node_rank > 0:
        return port
    with contextlib.closing(socket.socket()) as probe:
        # A port whose last connection is just closing is free for the launcher, which sets this.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
        except OSError as error:
            fail(f'PORT {port} can not be used: {error.strerror}. Give another one by PORT=...')
        return probe.getsockname()[1]


def main() -> None:
    if len(sys.argv) < 3:
        fail('usage: python tools/launch.py GPUS SCRIPT [ARGUMENT ...]')
    gpus = integer('GPUS', sys.argv[1], 1)
    nnodes = integer('NNODES', os.environ.get('NNODES', '1'), 1)
    node_rank = integer('NODE_RANK', os.environ.get('NODE_RANK', '0'), 0)
    address = os.environ.get('MASTER_ADDR', '127.0.0.1')
    if node_rank >= nnodes:
        fail(f'NODE_RANK must be below NNODES ({nnodes}), got {node_rank}')
    port = port_for(nnodes, node_rank)

    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.cuda.is_available() and gpus > torch.cuda.device_count():
        fail(f'GPUS is {gpus}, but this machine has {torch.cuda.device_count()}')
    # Its messages about signals and exit codes are told below, in one line.
    logging.disable(logging.ERROR)
    os.environ[_LAUNCHER_PID] = str(os.getpid())
    messages = tempfile.TemporaryDirectory()  # torch never removes its own
    config = LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=gpus,
        run_id='mmstepnet',
        rdzv_backend='static',
        rdzv_endpoint=f'{address}:{port}',
        rdzv_configs=dict(rank=node_rank, timeout=NODES_SECONDS),
        max_restarts=0,
        local_addr='127.0.0.1' if nnodes == 1 else None,
        logs_specs=DefaultLogsSpecs(messages.name),
    )
    try:
        elastic_launch(config, sys.executable)('-u', *sys.argv[2:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(
                f'error: process {rank} (pid {failure.pid}) was ended by '
                f'{failure.signal_name()}; all others were stopped. '
                'train.py --resume goes on from the last checkpoint',
                file=sys.stderr,
            )
            raise SystemExit(128 - failure.exitcode) from None
        if failure.exitcode == BAD_INPUT:
            raise SystemExit(BAD_INPUT) from None
        print(
            f'error: process {rank} ended with exit code {failure.exitcode}; '
            'all others were stopped. The reason stands above',
            file=sys.stderr,
        )
        raise SystemExit(failure.exitcode) from None
    except (RendezvousError, torch.distributed.DistError):
        fail(
            f'the {nnodes} nodes have not met at {address}:{port} within {NODES_SECONDS} s: run '
            f'the same command on each, with NODE_RANK 0 to {nnodes - 1}, NNODES={nnodes}, and the '
            "first one's address as MASTER_ADDR"
        )
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        print(
            f'\n{name}: all processes were stopped. '
            'train.py --resume goes on from the last checkpoint',
            file=sys.stderr,
        )
        raise SystemExit(128 + error.sigval) from None
    finally:
        messages.cleanup()
        # Whoever called this goes on in an environment without a launcher.
        os.environ.pop(_LAUNCHER_PID, None)


prepare_process()
if __name__ == '__main__':
    main()
