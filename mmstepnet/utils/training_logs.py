"""What MMEngine logged of a training, put together from all its starts, and trainings that differ
in nothing but their seed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

import numpy as np
from mmengine.config import Config

# Settings that say where, with which seed or how visibly a training ran, not what it computed.
_INCIDENTAL = (
    *('work_dir', 'randomness', 'resume', 'launcher', 'log_level', 'experiment_name', 'env_cfg'),
    *('log_processor', 'visualizer', 'vis_backends'),
)


@dataclass(frozen=True)
class TrainingLog:
    """The log of one training.

    Attributes:
        work_dir: Its folder.
        training: Lines logged in training, by rising iteration.
        evaluations: Lines logged by evaluations, by rising epoch or iteration (``step``).
        config: The config file's name without ending, or the folder's if MMEngine left no config.
        settings: All settings that decide on the training but the seed, flat (``model.type``);
            None without a config.
        seed: The seed; None if none was set.
    """

    work_dir: Path
    training: list[dict]
    evaluations: list[dict]
    config: str
    settings: dict[str, str] | None
    seed: int | None

    @cached_property
    def iterations_per_epoch(self) -> int | None:
        """Iterations of an epoch; None if the training does not count epochs.

        It follows from the first lines of two epochs, which stand at the same place in both. A
        training with a single epoch so far is taken to have ended it at its last line.
        """
        first = {}
        for line in self.training:
            if 'epoch' in line:
                first.setdefault(line['epoch'], line['iter'])
        if not first:
            return None
        lengths = [first[e + 1] - first[e] for e in first if e + 1 in first]
        return min(lengths) if lengths else self.training[-1]['iter']

    def curve(self, key: str, by_epoch: bool) -> tuple[np.ndarray, np.ndarray]:
        """A quantity along the training.

        Args:
            key: Its name in the log.
            by_epoch: Whether to count epochs instead of iterations.

        Returns:
            tuple: Epochs or iterations, and values; both empty if the log has no such key.

        Raises:
            ValueError: Epochs are wanted of a training that does not count them.
        """
        length = self.iterations_per_epoch
        if by_epoch and length is None:
            raise ValueError(f'{self.work_dir} does not count epochs: give by_epoch=False')
        unit = length if by_epoch else 1
        points = [(line['iter'] / unit, line[key]) for line in self.training if key in line]
        if not points:
            # MMEngine counts evaluations in the training's own unit.
            unit = 1 if by_epoch or length is None else length
            points = [(line['step'] * unit, line[key]) for line in self.evaluations if key in line]
        x, y = zip(*points, strict=True) if points else ((), ())
        return np.array(x, float), np.array(y, float)

    @property
    def quantities(self) -> list[str]:
        """Names of all numbers in the log but counters, those of the training first."""
        lines = (*self.training, *self.evaluations)
        found = dict.fromkeys(key for line in lines for key in line)
        return [key for key in found if key not in ('epoch', 'iter', 'step')]

    @cached_property
    def timing(self) -> dict[str, float]:
        """How long the training took, evaluations and checkpoints left out; empty if not logged.

        ``mean`` and ``median`` seconds of an iteration; ``data_share``, the part of the time in
        which it waited for data (0 to 1); ``epoch``, mean seconds of an epoch, where epochs are
        counted; ``total``, seconds from the first iteration to the last line. MMEngine logs
        averages over the last iterations before a line, by which each line stands for all since the
        line before.
        """
        lines = [line for line in self.training if 'time' in line]
        if not lines:
            return {}
        iterations = np.diff([0, *(line['iter'] for line in lines)])
        seconds = np.array([line['time'] for line in lines])
        total = float(iterations @ seconds)
        found = dict(mean=total / lines[-1]['iter'], median=median(seconds.tolist()), total=total)
        waiting = np.array([line.get('data_time', np.nan) for line in lines])
        if np.isfinite(waiting).all():
            found['data_share'] = float(iterations @ waiting) / total
        if self.iterations_per_epoch is not None:
            found['epoch'] = found['mean'] * self.iterations_per_epoch
        return found


def read_log(work_dir: str | Path) -> tuple[list[dict], list[dict]]:
    """What MMEngine logged in a work directory, put together to one training.

    A training that was resumed, or started anew in the same folder, has logged some iterations more
    than once: what a later start says counts, and what an earlier one had said beyond its
    beginning is forgotten.

    Args:
        work_dir: Folder with ``*/vis_data/scalars.json``; one without has two empty lists.

    Returns:
        tuple: Lines of the training by rising iteration, and of the evaluations by rising epoch or
        iteration (``step``).
    """
    training, evaluations = [], []
    for line in _logged_lines(Path(work_dir)):
        if 'iter' in line:
            while training and training[-1]['iter'] >= line['iter']:
                training.pop()
            evaluations = [pair for pair in evaluations if pair[0] < line['iter']]
            training.append(line)
        elif 'step' in line:
            evaluations = [pair for pair in evaluations if pair[1]['step'] < line['step']]
            # With the iteration that it came after.
            evaluations.append((training[-1]['iter'] if training else 0, line))
    return training, [line for _, line in evaluations]


def _logged_lines(work_dir: Path) -> Iterator[dict]:
    for file in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                # The last line of a process that was killed while it wrote.
                continue


def read_training_log(work_dir: str | Path) -> TrainingLog:
    """Read the log of a training from its work directory, see :func:`read_log`.

    Args:
        work_dir: Folder with ``*/vis_data/scalars.json``.

    Raises:
        ValueError: No start has logged anything, or the last one's config can't be read.
    """
    work_dir = Path(work_dir)
    training, evaluations = read_log(work_dir)
    if not training and not evaluations:
        raise ValueError(f'{work_dir} has no log: nothing in {work_dir}/*/vis_data/scalars.json')
    config, settings, seed = _read_settings(work_dir)
    return TrainingLog(work_dir, training, evaluations, config, settings, seed)


def _read_settings(work_dir: Path) -> tuple[str, dict[str, str] | None, int | None]:
    # MMEngine copies the config file, and writes what it was merged to at each start.
    files = [path for path in sorted(work_dir.glob('*.py')) if path.is_file()]
    name = files[-1].stem if len(files) == 1 else work_dir.resolve().name
    starts = sorted(work_dir.glob('*/vis_data/scalars.json'))
    merged = [path.with_name('config.py') for path in starts]
    merged = [path for path in merged if path.is_file()] or files
    if not merged:
        return name, None, None
    try:
        cfg = Config.fromfile(merged[-1], import_custom_modules=False)
    except Exception as error:
        # A config is Python: it can fail in any way.
        raise ValueError(f'{merged[-1]} is no config that can be read: {error}') from error
    seed = (cfg.get('randomness') or {}).get('seed')
    settings = cfg.to_dict()
    # Of a resumed training it names the checkpoint to go on from.
    settings['load_from'] = None if cfg.get('resume') else cfg.get('load_from')
    return name, _flat({k: v for k, v in settings.items() if k not in _INCIDENTAL}), seed


def _flat(value: object, name: str = '') -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value):
        items = enumerate(value)
    else:
        return {name: str(value)}
    parts = {}
    for key, part in items:
        parts.update(_flat(part, f'{name}.{key}' if name else str(key)))
    return parts


def group_by_settings(logs: Sequence[TrainingLog]) -> dict[str, list[TrainingLog]]:
    """Trainings of the same settings and different seeds belong together.

    Args:
        logs: Trainings.

    Returns:
        dict[str, list[TrainingLog]]: Trainings by a name: that of the config, with the settings
        that differ where several groups have the same config; of trainings that can't be told apart
        by settings and seed, each is a group of its own and has the folder's name too.
    """
    groups = []
    for log in logs:
        for group in groups:
            seeds = {other.seed for other in group}
            alike = (group[0].config, group[0].settings) == (log.config, log.settings)
            if alike and log.settings is not None and log.seed not in (*seeds, None):
                group.append(log)
                break
        else:
            groups.append([log])
    names = [_name(group, groups) for group in groups]
    for i, group in enumerate(groups):
        if names.count(names[i]) > 1:
            groups[i] = (f'{names[i]} ({group[0].work_dir})', group)
        else:
            groups[i] = (names[i], group)
    return dict(groups)


def _name(group: list[TrainingLog], groups: list[list[TrainingLog]]) -> str:
    own = group[0].settings or {}
    namesakes = [other[0].settings or {} for other in groups if other[0].config == group[0].config]
    differing = [key for key in own if len({other.get(key) for other in namesakes}) > 1]
    shown = [f'{key.split(".")[-1]}={own[key]}' for key in differing[:2]]
    more = ['…'] if len(differing) > 2 else []
    return ' '.join([group[0].config, *shown, *more])


def best_is(key: str) -> str | None:
    """Whether the best value of a quantity is its ``'smallest'`` (losses) or ``'largest'``.

    None for what has no better direction: stiffness, learning rates, gradients, times, memory.
    """
    kind = key.rpartition('/')[2]
    if 'loss' in kind:
        return 'smallest'
    neutral = key.startswith('stiffness/') or 'time' in kind
    return None if neutral or kind in ('lr', 'grad_norm', 'memory') else 'largest'


def best_value(values: np.ndarray, key: str) -> float:
    """The best of some values of a quantity that :func:`best_is` knows, NaN left out."""
    return float((np.nanmin if best_is(key) == 'smallest' else np.nanmax)(values))


def mean_over_runs(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average curves of several runs, position by position, over the runs that have it.

    Args:
        curves: Positions and values of each run.

    Returns:
        tuple: Positions, means, and standard deviations (n - 1; NaN where a single run has it).
    """
    at = {}
    for x, y in curves:
        for position, value in zip(x.tolist(), y.tolist(), strict=True):
            at.setdefault(position, []).append(value)
    x = sorted(at)
    mean = [fmean(at[position]) for position in x]
    deviation = [np.std(at[p], ddof=1) if len(at[p]) > 1 else np.nan for p in x]
    return np.array(x), np.array(mean), np.array(deviation)
