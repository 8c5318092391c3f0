"""Compare trainings by their logs: curves in one figure, last and best values, and times.

A training is known by its work directory, with all its starts: what was resumed is one curve.
Trainings that differ in nothing but the seed are one curve with a band, mean ± standard deviation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import glob
import math
import os

import numpy as np

from mmstepnet.utils.command_line import fail, reason
from mmstepnet.utils.text_table import Table, mean_and_std
from mmstepnet.utils.training_logs import (
    TrainingLog,
    best_is,
    best_value,
    group_by_settings,
    mean_over_runs,
    read_training_log,
)
from mmstepnet.visualization import save_figure
from mmstepnet.visualization.labels import four_digits, with_error
from mmstepnet.visualization.log_figures import log_figure

FORMATS = ('png', 'pdf', 'svg')
# Taken by default where they are in some log.
SCORES = ('coco/bbox_mAP', 'coco/segm_mAP', 'pascal_voc/mAP', 'accuracy/top1')
ALWAYS = ('loss', 'stiffness/tns')


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  analyze_logs.py work_dirs/org work_dirs/stepnet --out curves.png
  analyze_logs.py work_dirs/seeds --keys loss_bbox coco/bbox_mAP_75 --out curves.pdf
""",
    )
    parser.add_argument(
        'runs',
        nargs='+',
        metavar='RUN',
        help='a work directory, a folder that holds some, at any depth, or a pattern (quoted)',
    )
    parser.add_argument(
        '--keys',
        nargs='+',
        metavar='KEY',
        help='what to show, by its name in the log; --keys ? lists the names (default: '
        f'{", ".join((ALWAYS[0], *SCORES, ALWAYS[1]))}, those that are there)',
    )
    parser.add_argument(
        '--out', type=Path, help='draw the curves there; the ending says how: .png, .pdf or .svg'
    )
    args = parser.parse_args(argv)
    if args.out is not None and args.out.suffix[1:] not in FORMATS:
        parser.error(f'--out must end in .png, .pdf or .svg, got {args.out}')
    return args


def find_runs(arguments: list[str]) -> list[Path]:
    """The work directories that the command line means, each once, in its order.

    Raises:
        ValueError: An argument that stands for none.
    """
    found = {}
    for argument in arguments:
        paths = [argument] if Path(argument).exists() else sorted(glob.glob(argument))
        if not paths:
            raise ValueError(f'RUN {argument}: no such folder or match of a pattern')
        logs = [log for path in paths for log in sorted(Path(path).rglob('vis_data/scalars.json'))]
        # RUN/START/vis_data/scalars.json
        folders = [(log if len(log.parents) > 2 else log.resolve()).parents[2] for log in logs]
        if not folders:
            raise ValueError(
                f'RUN {argument}: no training has logged there (*/vis_data/scalars.json)'
            )
        found.update((folder.resolve(), folder) for folder in folders)
    return list(found.values())


def choose_keys(logs: list[TrainingLog], keys: list[str] | None) -> list[str]:
    """The quantities to show.

    Raises:
        ValueError: One that no log has, or nothing to show.
    """
    known = list(dict.fromkeys(key for log in logs for key in log.quantities))
    wanted = keys or [key for key in (ALWAYS[0], *SCORES, ALWAYS[1]) if key in known]
    missing = [key for key in wanted if key not in known]
    if missing or not wanted:
        what = f'no log has {", ".join(missing)}' if missing else 'give some'
        raise ValueError(f'--keys: {what}; there are {", ".join(known)}')
    return list(dict.fromkeys(wanted))


def name_runs(logs: list[TrainingLog]) -> dict[int, str]:
    """Each training's folder, without what all have in common, by ``id``."""
    paths = [log.work_dir.resolve() for log in logs]
    common = os.path.commonpath([path.parent for path in paths])
    return {id(log): str(p.relative_to(common)) for log, p in zip(logs, paths, strict=True)}


def value_table(
    groups: dict[str, list[TrainingLog]],
    keys: list[str],
    curves: dict[int, dict],
    names: dict[int, str],
    unit: str,
) -> Table:
    """One row a run: last and best values, with the epoch or iteration of the best."""
    table = Table(['run', 'settings', 'seed', unit, *_headings(keys)])
    for settings, logs in groups.items():
        for log in logs:
            cells = []
            for key in keys:
                x, y = curves[id(log)][key]
                cells.append(four_digits(float(y[-1]) if len(y) else None))
                if best_is(key) and np.isfinite(y).any():
                    best = best_value(y, key)
                    cells.append(f'{four_digits(best)} @ {x[y == best][0]:.4g}')
                elif best_is(key):
                    cells.append('–')
            ends = [float(x[-1]) for x, _ in curves[id(log)].values() if len(x)]
            table.rows.append(
                [
                    *(names[id(log)], settings, '–' if log.seed is None else str(log.seed)),
                    f'{max(ends):.4g}' if ends else '–',
                    *cells,
                ]
            )
    return table


def _headings(keys: list[str]) -> list[str]:
    return [cell for key in keys for cell in ((key, 'best') if best_is(key) else (key,))]


def time_table(logs: list[TrainingLog], names: dict[int, str]) -> Table:
    """One row a run: seconds of an iteration and of an epoch, the part of them spent waiting."""
    table = Table(['run', 's/iteration', 'median', 'data_time/time', 's/epoch', 'training'])
    for log in logs:
        timing = log.timing
        share = timing.get('data_share')
        table.rows.append(
            [
                names[id(log)],
                *(four_digits(timing.get(key)) for key in ('mean', 'median')),
                '–' if share is None else f'{100 * share:.1f} %',
                four_digits(timing.get('epoch')),
                duration(timing.get('total')),
            ]
        )
    return table


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; a dash for None."""
    if seconds is None:
        return '–'
    minutes, rest = divmod(round(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02d}:{rest:02d}'


def group_table(
    groups: dict[str, list[TrainingLog]], keys: list[str], curves: dict[int, dict]
) -> Table:
    """One row a group: mean and standard deviation of last and best values over its runs, those
    that came as far as the others."""
    table = Table(['settings', 'runs', *_headings(keys)])
    for settings, logs in groups.items():
        cells = []
        for key in keys:
            found = [curve for log in logs if len((curve := curves[id(log)][key])[0])]
            end = max((x[-1] for x, _ in found), default=None)
            complete = [y for x, y in found if x[-1] == end]
            cells.append(_spread([float(y[-1]) for y in complete], len(logs)))
            if best_is(key):
                cells.append(_spread([best_value(y, key) for y in complete], len(logs)))
        table.rows.append([settings, str(len(logs)), *cells])
    return table


def _spread(values: list[float], runs: int) -> str:
    if not values:
        return '–'
    mean, deviation = mean_and_std(values)
    text = with_error(mean, None if math.isnan(deviation) else deviation)
    return text if len(values) == runs else f'{text} ({len(values)} of {runs})'


def main(argv=None) -> None:
    args = parse_args(argv)
    try:
        logs = [read_training_log(run) for run in find_runs(args.runs)]
        keys = choose_keys(logs, args.keys)
        groups = group_by_settings(logs)
    except (OSError, ValueError) as error:
        fail(reason(error))
    by_epoch = all(log.iterations_per_epoch is not None for log in logs)
    curves = {id(log): {key: log.curve(key, by_epoch) for key in keys} for log in logs}
    names = name_runs(logs)
    unit = 'epoch' if by_epoch else 'iteration'
    print(value_table(groups, keys, curves, names, unit).text())
    if len(groups) < len(logs):
        print('\nMean ± standard deviation over seeds\n')
        print(group_table(groups, keys, curves).text())
    print('\nTime without evaluations\n')
    print(time_table(logs, names).text())
    if args.out is None:
        return
    drawn = {}
    for name, members in groups.items():
        label = f'{name} ({len(members)} seeds)' if len(members) > 1 else name
        found = {key: [curves[id(log)][key] for log in members] for key in keys}
        drawn[label] = {
            key: mean_over_runs(runs) for key, runs in found.items() if any(len(x) for x, _ in runs)
        }
    figure = log_figure(drawn, unit.capitalize())
    save_figure(figure, args.out.with_suffix(''), formats=(args.out.suffix[1:],))
    print(f'\n{args.out}', file=sys.stderr)


if __name__ == '__main__':
    main()
