"""Tables of many training runs that can be stopped and started again.

A run is one training with one seed. It owns a folder; when it is done, ``result.json`` lies there,
and the run is never repeated. A run without that file was broken off: its training goes on from
its newest checkpoint. Tables are made of the results alone.
"""

import fcntl
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from mmstepnet.utils.files import write_whole
from mmstepnet.utils.text_table import Table
from mmstepnet.utils.training_logs import read_log

RESULT = 'result.json'
FORMAT = 'mmstepnet.run/1'
# What holds configs and tools: the repository, or .mim of an installed package.
ROOT = Path(__file__).parents[2]
if not (ROOT / 'tools' / 'reproduce.py').is_file():
    ROOT = Path(__file__).parents[1] / '.mim'
_children: set[subprocess.Popen] = set()
_say = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        row: Row of the table, the method for instance.
        column: Column, the data set for instance.
        seed: Random seed.
        root: Folder of the table's runs.
        config: Config file, for runs that ``tools/train.py`` does; absolute, or as seen from the
            repository's root.
        options: ``--cfg-options`` of such a run, or the settings of another kind of run. Part of
            what the result is recognised by.
    """

    row: str
    column: str
    seed: int
    root: Path
    config: str | None = None
    options: dict = field(default_factory=dict)

    @property
    def work_dir(self) -> Path:
        """The run's own folder."""
        return Path(self.root) / self.column / self.row / f'seed{self.seed}'

    @property
    def settings(self) -> dict:
        """Everything that decides on the run's outcome, as JSON holds it."""
        settings = {k: v for k, v in asdict(self).items() if k != 'root'}
        return json.loads(json.dumps(settings))


class RunError(RuntimeError):
    """A run failed, or its folder holds the result of other settings."""


def read_result(run: Run) -> dict | None:
    """The result of a finished run; None if the run isn't finished.

    Raises:
        RunError: The folder holds a result of other settings, or one that can't be read.
    """
    path = run.work_dir / RESULT
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise RunError(f'{path} is no valid JSON ({error}); delete it to repeat the run') from error
    given = result.get('settings') if isinstance(result, dict) else None
    if not isinstance(given, dict) or result.get('format') != FORMAT:
        raise RunError(f'{path} is not of format {FORMAT!r}; delete it to repeat the run')
    wanted = run.settings
    if given != wanted:
        differing = sorted(k for k in {*given, *wanted} if given.get(k) != wanted.get(k))
        raise RunError(
            f'{path} comes from other settings ({", ".join(differing)} differ): choose another '
            '--work-dir, or delete the folder to repeat the run'
        )
    return result


def write_result(run: Run, **content) -> dict:
    """Write ``result.json`` at once or not at all, and return what it holds."""
    result = dict(format=FORMAT, settings=run.settings, **content)
    write_whole(json.dumps(result, indent=1) + '\n', run.work_dir / RESULT)
    return result


def complete(
    runs: Sequence[Run],
    execute: Callable[[Run], dict],
    say: Callable[[str], None] = _say,
    workers: int = 1,
) -> list[dict]:
    """Do what is missing of ``runs`` in their order and return all results.

    Args:
        runs: The runs of a table.
        execute: Does one run and returns what its result holds: ``metrics`` (numbers by name) and
            whatever else JSON takes; ``seconds`` are measured where it returns none. With several
            workers it is called from threads.
        say: Takes a line about each run and the time left.
        workers: Runs at the same time.

    Raises:
        RunError: From ``execute`` or :func:`read_result`. What was done before stays done; what
            runs at the same time is ended.
    """
    results = [read_result(run) for run in runs]
    missing = [i for i, result in enumerate(results) if result is None]
    if len(missing) < len(runs):
        say(f'{len(runs) - len(missing)} of {len(runs)} runs are already there')
    begin = time.monotonic()
    started = done = 0
    one = threading.Lock()

    def do(i: int) -> None:
        nonlocal started, done
        run = runs[i]
        with one:
            started += 1
            passed = time.monotonic() - begin
            left = (
                f', about {_duration(passed / done * (len(missing) - done))} left' if done else ''
            )
            say(f'[{started}/{len(missing)}] {run.column} {run.row} seed {run.seed}{left}')
        run.work_dir.mkdir(parents=True, exist_ok=True)
        with _locked(run):
            # Another command may have finished it since this one began.
            results[i] = read_result(run)
            if results[i] is None:
                start = time.monotonic()
                content = execute(run)
                seconds = dict(seconds=round(time.monotonic() - start, 2))
                results[i] = write_result(run, **seconds | content)
        with one:
            done += 1

    if workers == 1:
        for i in missing:
            do(i)
        return results
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(do, i) for i in missing]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            told: set[subprocess.Popen] = set()
            # Again and again: a worker may have taken the next run before the rest was cancelled.
            while not all(future.done() for future in futures):
                children = {*_children} - told
                for child in children:
                    child.terminate()
                told |= children
                time.sleep(0.1)
            raise
    return results


def finished(runs: Iterable[Run]) -> list[dict]:
    """The results that are there, in the order of ``runs``."""
    return [result for run in runs if (result := read_result(run)) is not None]


def train_command(run: Run, gpus: int = 0, options: Mapping[str, object] = {}) -> list[str]:
    """The command that trains a run, or goes on with it.

    Args:
        run: A run with a ``config``.
        gpus: Processes; with 0 or 1 a single one without launcher.
        options: Further ``--cfg-options``, which say how it is computed and not what: the pictures
            a GPU for instance.
    """
    given = run.options | dict(options) | {'randomness.seed': run.seed}
    config = str(ROOT / run.config)
    arguments = ['--work-dir', str(run.work_dir), '--resume', '--cfg-options', *_settings(given)]
    if gpus > 1:
        return ['bash', str(ROOT / 'tools/dist_train.sh'), config, str(gpus), *arguments]
    return [sys.executable, str(ROOT / 'tools/train.py'), config, *arguments]


def train(
    run: Run,
    gpus: int = 0,
    options: Mapping[str, object] = {},
    env: Mapping[str, str] = {},
) -> list[dict]:
    """Train a run in a process of its own, its output in ``console.log``.

    Args:
        run: See :func:`train_command`, ``gpus`` and ``options`` too.
        gpus: Processes.
        options: Further settings.
        env: Environment variables of the process, beside those of this one.

    Returns:
        list[dict]: The evaluations, see :func:`mmstepnet.utils.training_logs.read_log`.

    Raises:
        RunError: The training failed; with the end of its output. Or another process is at it.
    """
    run.work_dir.mkdir(parents=True, exist_ok=True)
    with _locked(run) as lock:
        _call(run, train_command(run, gpus, options), env, lock)
        _, found = read_log(run.work_dir)
        checkpoint = _last_checkpoint(run.work_dir)
        if checkpoint is not None and checkpoint[0] not in {line['step'] for line in found}:
            # Broken off between the last checkpoint and its evaluation: nothing was left to train.
            out = run.work_dir / 'last_evaluation.json'
            command = [sys.executable, str(ROOT / 'tools/test.py'), str(ROOT / run.config)]
            command += [str(checkpoint[1]), '--work-dir', str(run.work_dir)]
            command += ['--out', str(out), '--out-item', 'metrics']
            if run.options:
                command += ['--cfg-options', *_settings(run.options)]
            _call(run, command, env, lock)
            found.append(dict(json.loads(out.read_text()), step=checkpoint[0]))
    if not found:
        raise RunError(f'run {run.work_dir} was not evaluated once: its log has no metric')
    return found


def _last_checkpoint(work_dir: Path) -> tuple[int, Path] | None:
    """Epoch or iteration of the newest checkpoint, and its path."""
    found = [
        (int(match[1]), path)
        for path in Path(work_dir).glob('*.pth')
        if (match := re.fullmatch(r'(?:epoch|iter)_(\d+)\.pth', path.name))
    ]
    return max(found, default=None)


def _call(run: Run, command: list[str], env: Mapping[str, str], lock: int) -> None:
    log = run.work_dir / 'console.log'
    # Several runs at a time each find a port of their own, on this machine.
    ours = ('PORT', 'NNODES', 'NODE_RANK', 'MASTER_ADDR')
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    with log.open('a') as stream:
        # The training holds the lock too: it may outlive this process, if that is killed.
        child = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            # dist_train.sh would run whichever Python stands first on the PATH.
            env={**inherited, 'PYTHON': sys.executable, **env},
            pass_fds=[lock],
        )
        _children.add(child)
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        finally:
            _children.discard(child)
    if code:
        tail = '\n'.join(log.read_text(errors='replace').splitlines()[-15:])
        raise RunError(
            f'run {run.work_dir} ended with exit code {code}; the end of {log}:\n{tail}\n'
            f'command: {shlex.join(command)}'
        )


# What this thread has locked: complete() locks a run, and train() in it once more.
_mine = threading.local()


@contextmanager
def _locked(run: Run) -> Iterator[int]:
    """Keep others from doing the same run; yields the open lock file."""
    path = run.work_dir / '.lock'
    held = _mine.__dict__.setdefault('held', {})
    if path in held:
        yield held[path]
        return
    with path.open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f'run {run.work_dir} is being trained by another process: wait for it or end it'
            ) from error
        except OSError as error:
            raise RunError(
                f'{path} can not be locked ({error.strerror}): choose a --work-dir on a file '
                'system that has locks'
            ) from error
        held[path] = file.fileno()
        try:
            yield file.fileno()
        finally:
            del held[path]


def seconds_logged(work_dir: Path) -> float:
    """Seconds that all starts of a training took together, each up to the last line it logged."""
    return sum(
        file.stat().st_mtime - datetime.strptime(file.parts[-3], '%Y%m%d_%H%M%S').timestamp()
        for file in Path(work_dir).glob('*/vis_data/scalars.json')
    )


def epoch_losses(work_dir: Path) -> list[float]:
    """The last loss that was logged in each epoch of a training."""
    training, _ = read_log(work_dir)
    by_epoch = {line['epoch']: line['loss'] for line in training if {'epoch', 'loss'} <= {*line}}
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def last_and_best(found: Sequence[dict], metric: str) -> dict[str, float]:
    """Metrics ``last`` and ``best`` (the largest) of a training's evaluations.

    Raises:
        RunError: No evaluation has the metric.
    """
    values = [line[metric] for line in found if metric in line]
    if not values:
        known = sorted({key for line in found for key in line} - {'step', 'data_time', 'time'})
        raise RunError(f'metric {metric!r} is in no evaluation; there is {", ".join(known)}')
    return dict(last=values[-1], best=max(values))


def runs_table(results: Sequence[dict]) -> Table:
    """Every run on a line of its own: what it is, its metrics as measured, and its seconds."""
    names = list(dict.fromkeys(name for result in results for name in result['metrics']))
    table = Table(['column', 'row', 'seed', *names, 'seconds'])
    for result in results:
        settings = result['settings']
        values = [settings['column'], settings['row'], settings['seed']]
        values += [result['metrics'].get(name, '') for name in names]
        table.rows.append([str(value) for value in [*values, result['seconds']]])
    return table


def _settings(options: Mapping[str, object]) -> list[str]:
    return [f'{key}={_literal(value)}' for key, value in options.items()]


def _literal(value: object) -> str:
    """A value as ``--cfg-options`` reads it."""
    return value if isinstance(value, str) else repr(value).replace(' ', '')


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f'{seconds:.0f} s'
    if seconds < 5400:
        return f'{seconds / 60:.0f} min'
    return f'{seconds / 3600:.1f} h'
