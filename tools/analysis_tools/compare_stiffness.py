"""Put stiffness reports side by side: a table, figures, and one HTML page with everything.

A report is what StiffnessHook and tools/analysis_tools/stiffness.py write. Reports that name the
same model are taken for runs of that model, with different seeds for example.
"""

import argparse
import glob
import os
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from mmstepnet.stiffness.report import read_report, read_samples
from mmstepnet.utils.command_line import fail, reason
from mmstepnet.visualization import (
    comparison_figures,
    group_by_model,
    save_figure,
    stiffness_figures,
)
from mmstepnet.visualization.comparison_page import NSI_FORMULA, Cell, Section, Table, render_page
from mmstepnet.visualization.labels import four_digits, metric_label, with_error

# Tried in this order when --metric isn't given.
METRICS = (
    'accuracy/top1',
    'single-label/f1-score',
    'multi-label/mAP',
    'coco/bbox_mAP',
    'pascal_voc/mAP',
)


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  compare_stiffness.py work_dirs/resnet50 work_dirs/resnet50_stepnet
  compare_stiffness.py 'work_dirs/*_cifar10/seed*' --metric accuracy/top1 --out-dir cifar10
""",
    )
    parser.add_argument(
        'reports',
        nargs='+',
        metavar='REPORT',
        help='a report (.json), a pattern (quoted), or a folder such as a work dir, which stands '
        'for the newest report of each folder named "stiffness" in it, or, where there is no such '
        'folder, for all reports in it',
    )
    parser.add_argument(
        '--out-dir',
        default='stiffness_comparison',
        help='where comparison.html and the figures (PNG, PDF) go (default: %(default)s)',
    )
    parser.add_argument(
        '--metric',
        help='which metric of the reports is the accuracy that is drawn against TNS (default: the '
        f'first of {", ".join(METRICS)} that all reports have)',
    )
    parser.add_argument(
        '--allow-mixed',
        action='store_true',
        help='compare even what was measured on other data, other numbers of samples or with '
        'another step',
    )
    return parser.parse_args(argv)


def find_reports(arguments: list[str]) -> list[Path]:
    """Return the report files that the command line means, each once, in its order.

    Raises:
        FileNotFoundError: An argument that stands for no report.
    """
    found = {}
    for argument in arguments:
        paths = (
            [argument] if os.path.exists(argument) else sorted(glob.glob(argument, recursive=True))
        )
        files = [file for path in map(Path, paths) for file in _in_path(path)]
        if not files:
            what = 'no reports in it' if paths else 'no such file, folder or match of a pattern'
            raise FileNotFoundError(f'{argument}: {what}')
        found.update((file.resolve(), file) for file in files)
    return list(found.values())


def _in_path(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    folders = [path] if path.name == 'stiffness' else sorted(path.rglob('stiffness'))
    series = [files for folder in folders if (files := sorted(folder.glob('*.json')))]
    if not series:
        return sorted(path.glob('*.json'))
    return [max(files, key=lambda file: read_report(file)['created']) for files in series]


def check_comparable(reports: list[dict], files: list[Path]) -> str | None:
    """Return what makes the reports incomparable, or None."""
    aspects = {
        'data sets': lambda report: report['dataset'],
        'steps': lambda report: report['step'],
        'numbers of samples': lambda report: report['num_samples'] + report['num_omitted'],
    }
    found = []
    for aspect, value_of in aspects.items():
        values = {}
        for report, file in zip(reports, files, strict=True):
            values.setdefault(value_of(report), []).append(str(file))
        if len(values) > 1:
            listed = '; '.join(
                f'{value!r} in {_list_few(names)}' for value, names in values.items()
            )
            found.append(f'different {aspect}: {listed}')
    names: dict[str, set] = {}
    for report in reports:
        names.setdefault(report['model'], set()).add(tuple(report['names']))
    if differing := [model for model, choices in names.items() if len(choices) > 1]:
        found.append(f'different blocks of one model: {_list_few(differing)}')
    first = {report.get('exclude_first') for report in reports} - {None}
    if len(first) > 1:
        found.append('some without the first blocks of their stages (exclude_first), some with')
    return '. '.join(found) or None


def _list_few(names: list[str]) -> str:
    more = f' and {len(names) - 3} more' if len(names) > 3 else ''
    return ', '.join(names[:3]) + more


def choose_metric(reports: list[dict], metric: str | None) -> str | None:
    """Return the metric to draw: the one asked for, the first known one, or None.

    Raises:
        ValueError: A report lacks the metric that was asked for.
    """
    shared = set.intersection(*(set(_numbers(report)) for report in reports))
    if metric is None:
        return next((name for name in METRICS if name in shared), None)
    if metric not in shared:
        raise ValueError(f'--metric {metric}: not in every report, which share {sorted(shared)}')
    return metric


def _numbers(report: dict) -> dict[str, float]:
    return {
        name: value
        for name, value in report['metrics'].items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def run_table(reports: list[dict], runs: list[str], metrics: list[str]) -> Table:
    """One row a report."""
    several = len(group_by_model(reports)) < len(reports)
    headings = ['Model', *(['Run'] if several else []), 'TNS ± std. error']
    headings += [*map(metric_label, metrics), 'Mean NSI', 'Largest block mean', 'Mean step size']
    headings += ['Blocks', 'Samples']
    rows = []
    for report, run in zip(reports, runs, strict=True):
        tns, step_sizes = report['tns'], report['dt_mean']
        numbers = _numbers(report)
        rows.append(
            [
                Cell(report['model'], report['model']),
                *([Cell(run, run)] if several else []),
                Cell(with_error(tns['mean'], tns['std_error']), tns['mean']),
                *(_number(numbers.get(metric)) for metric in metrics),
                _number(statistics.fmean(report['nsi_mean'])),
                _number(max(report['nsi_mean'])),
                _number(step_sizes and statistics.fmean(step_sizes)),
                Cell(str(len(report['names'])), len(report['names'])),
                Cell(f'{report["num_samples"]:,}', report['num_samples']),
            ]
        )
    return Table(headings, rows)


def model_table(reports: list[dict], metrics: list[str]) -> Table:
    """One row a model: mean and standard deviation over its runs."""
    rows = []
    for name, runs in group_by_model(reports).items():
        columns = [[run['tns']['mean'] for run in runs]]
        columns += [[_numbers(run).get(metric) for run in runs] for metric in metrics]
        rows.append(
            [Cell(name, name), Cell(str(len(runs)), len(runs)), *map(_mean_and_spread, columns)]
        )
    return Table(['Model', 'Runs', 'TNS', *map(metric_label, metrics)], rows)


def _mean_and_spread(values: list[float | None]) -> Cell:
    if None in values:
        return _number(None)
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Cell(with_error(statistics.fmean(values), spread), statistics.fmean(values))


def _number(value: float | None) -> Cell:
    return Cell(four_digits(value), value)


def format_table(table: Table) -> str:
    """A table as text, numbers to the right."""
    rows = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [any(isinstance(row[i].value, str) for row in table.rows) for i in range(len(widths))]
    lines = [
        '  '.join(
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(row, widths, text, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, '  '.join('-' * width for width in widths))
    return '\n'.join(lines)


def name_runs(reports: list[dict], files: list[Path]) -> list[str]:
    """What tells the runs apart: their seeds, or else what their paths do not share."""
    seeds = [report.get('seed') for report in reports]
    models = [report['model'] for report in reports]
    if None not in seeds and len(set(zip(models, map(str, seeds), strict=True))) == len(reports):
        return [f'seed {seed}' for seed in seeds]
    paths = [file.resolve().with_suffix('').parts for file in files]
    for end, rest in ((0, slice(1, None)), (-1, slice(None, -1))):
        while min(map(len, paths)) > 1 and len({parts[end] for parts in paths}) == 1:
            paths = [parts[rest] for parts in paths]
    return ['/'.join(parts) for parts in paths]


def load_samples(file: Path):
    """Return NSI and step sizes of a report, or None for both where its samples weren't copied."""
    try:
        return read_samples(file)
    except FileNotFoundError as error:
        print(f'note: {reason(error)}: its figures show means alone', file=sys.stderr)
        return None, None


def main(argv=None) -> None:
    args = parse_args(argv)
    try:
        files = find_reports(args.reports)
        reports = [read_report(file) for file in files]
        for report, file in zip(reports, files, strict=True):
            # A report in WORK_DIR/stiffness without a name is called after its work dir.
            folder = file.resolve().parent
            folder = folder.parent if folder.name == 'stiffness' else folder
            report['model'] = report['model'] or f'{folder.name}/{file.stem}'
        mixed = check_comparable(reports, files)
        if mixed and not args.allow_mixed:
            fail(f'the reports are not comparable ({mixed}). --allow-mixed compares them anyway')
        metric = choose_metric(reports, args.metric)
    except (OSError, ValueError) as error:
        fail(reason(error))

    models = group_by_model(reports)
    several = len(models) < len(reports)
    runs = name_runs(reports, files)
    shown = [] if metric is None else [metric]
    print(format_table(run_table(reports, runs, shown)))
    if several:
        print('\nMean ± standard deviation over runs\n')
        print(format_table(model_table(reports, shown)))
    if metric is None:
        print('\nNo metric is in every report, so there is no figure of accuracy against TNS.')

    out_dir = Path(args.out_dir)
    figures = comparison_figures(reports, metric)
    for name, figure in figures.items():
        save_figure(figure, out_dir / name)
    metrics = list(dict.fromkeys([*shown, *(name for r in reports for name in _numbers(r))]))
    tables = {
        'One row a report; ± is the standard error over samples': run_table(reports, runs, metrics)
    }
    if several:
        tables['Mean ± standard deviation over the runs of each model'] = model_table(
            reports, metrics
        )
    progress = track(
        list(zip(reports, files, runs, strict=True)),
        description='Drawing',
        console=Console(stderr=True),
        transient=True,
    )
    sections = []
    for report, file, run in progress:
        try:
            samples = load_samples(file)
        except (OSError, ValueError) as error:
            fail(reason(error))
        title = f'{report["model"]}, {run}' if len(models[report['model']]) > 1 else report['model']
        sections.append(Section(title, report, stiffness_figures(report, *samples)))

    page = out_dir / 'comparison.html'
    page.write_text(
        render_page(
            title=f'Stiffness of {len(models)} model' + 's' * (len(models) > 1),
            notes=_notes(reports, mixed),
            tables=tables,
            figures=figures,
            sections=sections,
        ),
        encoding='utf-8',
    )
    print(f'\nPage and figures: {page}')


def _notes(reports: list[dict], mixed: str | None) -> list[str]:
    if mixed:
        return [f'Caution, these are not comparable: {mixed}.']
    first = reports[0]
    data = f'Data set: {first["dataset"]}. ' if first['dataset'] else ''
    return [f'{data}{first["num_samples"]:,} samples each. {NSI_FORMULA[first["step"]]}.']


if __name__ == '__main__':
    main()
