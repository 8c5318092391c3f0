"""The tables of the StepNet paper, and small ones for CPUs, as runs of ``tools/reproduce.py``.

Every cell of a table is a config under ``configs/``. Runs of one cell with several seeds lie in
``WORK_DIR/GROUP/COLUMN/METHOD/seedN``, and tables of one group share them: what table 1 has trained
is not trained again for table 4.
"""

import functools
import shlex
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmstepnet.utils.text_table import Table, spread

from . import published
from .runs import ROOT, Run, last_and_best, seconds_logged, train

LABELS = {
    'org': 'Org',
    'se': 'SE',
    'cbam': 'CBAM',
    'eca': 'ECA',
    'sem': 'SEM',
    'srm': 'SRM',
    'fca': 'FCA',
    'sge': 'SGE',
    'ie': 'IE',
    'dia': 'DIA',
    'iebn': 'IEBN',
    'stepnet': 'StepNet',
}
_ABLATION = {
    'org': 'Org',
    'stepnet-current': 'F(x_t)',
    'stepnet-next': 'F(x_t+1)',
    'stepnet-difference': 'F(x_t+1 - x_t)',
    'stepnet': 'F(x_t+1, x_t), StepNet',
    'stepnet-a': 'adaptor a (own reading)',
    'stepnet-b': 'adaptor b (own reading)',
    'stepnet-c': 'adaptor c (own reading)',
    'stepnet-d': 'adaptor d (own reading)',
}
_SMALL = {'cifar10': 'CIFAR-10', 'cifar100': 'CIFAR-100', 'stl10': 'STL-10'}
_COCO = {
    'AP': 'coco/bbox_mAP',
    'AP50': 'coco/bbox_mAP_50',
    'AP75': 'coco/bbox_mAP_75',
    'AP small': 'coco/bbox_mAP_s',
    'AP medium': 'coco/bbox_mAP_m',
    'AP large': 'coco/bbox_mAP_l',
}
_SMALL_DETECTOR = dict(
    group='detection',
    config='{column}/faster_rcnn_r18_{method}_{column}.py',
    batch_size=8,
    metrics={label: _COCO[label] for label in ('AP', 'AP50', 'AP75')},
    scale=100,
    seeds=3,
    jobs=2,
)


# MMEngine's configs and registries are not made for threads.
_building = threading.Lock()


@dataclass(frozen=True)
class PaperTable:
    """A table: methods times data sets (or networks), each cell a config.

    Args:
        title: Its heading.
        group: Folder of its runs.
        config: Config of a cell, with ``{method}`` and ``{column}`` in its name.
        methods: Labels by name.
        columns: Labels by name.
        batch_size: Pictures a training step on all GPUs together.
        gpu_hours: Rough hours of one GPU that a run takes, by column; empty for tables that are
            made for CPUs.
        published: The paper's numbers, ``[method][column]``.
        metrics: Metric of each number in ``published``, by label. The first is what the best epoch
            is chosen by.
        scale: Factor that turns a metric into percent.
        gpus_per_run: GPUs that a run gets where there are as many.
        seeds: Seeds by default.
        jobs: Runs at a time without GPU, by default.
        correlate: Whether TNS and accuracy of the methods are correlated.
    """

    title: str
    group: str
    config: str
    methods: Mapping[str, str]
    columns: Mapping[str, str]
    batch_size: int
    gpu_hours: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, dict]] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=lambda: {'accuracy': 'accuracy/top1'})
    scale: float = 1.0
    gpus_per_run: int = 1
    seeds: int = 5
    jobs: int = 1
    correlate: bool = False

    def runs(
        self, root: Path, columns: Sequence[str], methods: Sequence[str], seeds: int
    ) -> list[Run]:
        """The runs of some cells, seed by seed, so that a table of fewer seeds is there early."""
        return [
            Run(method, column, seed, Path(root, self.group), self.config_file(method, column))
            for seed in range(seeds)
            for column in columns
            for method in methods
        ]

    def config_file(self, method: str, column: str) -> str:
        """Config of a cell, as seen from the folder that holds ``configs``."""
        return f'configs/{self.config.format(method=method, column=column)}'

    def execute(self, run: Run, gpus: int, env: Mapping[str, str] = {}) -> dict:
        """Train a run and measure it.

        Args:
            run: One of :meth:`runs`.
            gpus: GPUs of this run; 0 for the CPU.
            env: Environment variables of the training.

        Returns:
            dict: What its result holds: ``metrics`` with ``last`` and ``best`` of the first metric
            and the last value of all (in percent), ``parameters``, and ``tns`` where it was
            measured; ``gpus``; ``seconds`` of all its starts.

        Raises:
            RunError: The training failed.
        """
        found = train(run, gpus, self.machine_options(gpus), env)
        first, *_ = self.metrics.values()
        metrics = {k: self.scale * v for k, v in last_and_best(found, first).items()}
        for label, name in self.metrics.items():
            metrics[label] = self.scale * last_and_best(found, name)['last']
        if 'stiffness/tns' in found[-1]:
            metrics['tns'] = found[-1]['stiffness/tns']
        with _building:
            metrics['parameters'] = count_parameters(run.config)
        return dict(metrics=metrics, gpus=gpus, seconds=round(seconds_logged(run.work_dir), 2))

    def machine_options(self, gpus: int) -> dict[str, int]:
        """Settings of a run that follow from its number of GPUs.

        Raises:
            ValueError: ``gpus`` does not divide the batch size.
        """
        processes = max(gpus, 1)
        if self.batch_size % processes:
            raise ValueError(f'{gpus} GPUs a run do not divide the batch size {self.batch_size}')
        return {'train_dataloader.batch_size': self.batch_size // processes}

    def fitting_gpus(self, gpus: int) -> int:
        """GPUs of a run where ``gpus`` are there: the most that share the batch evenly, up to
        ``gpus_per_run``.
        """
        most = min(gpus, self.gpus_per_run)
        return next((n for n in range(most, 0, -1) if self.batch_size % n == 0), 0)

    def hours(self, missing: Sequence[Run], results: Sequence[dict]) -> float:
        """GPU hours of the missing runs: as finished runs of a column took, else the estimates."""
        measured: dict[str, list[float]] = {}
        for result in results:
            if result['gpus']:
                column = result['settings']['column']
                hours = result['seconds'] * result['gpus'] / 3600
                measured.setdefault(column, []).append(hours)
        return sum(
            statistics.fmean(measured.get(run.column, [self.gpu_hours[run.column]]))
            for run in missing
        )

    def tables(
        self, results: Sequence[dict], columns: Sequence[str], methods: Sequence[str]
    ) -> dict[str, Table]:
        """The table of some cells, and the correlation of TNS with accuracy where it is asked for.

        Args:
            results: Results of finished runs.
            columns: Columns of the table, rows of what is printed.
            methods: Methods, likewise.
        """
        by_cell: dict[tuple[str, str], list[dict]] = {}
        for result in results:
            settings = result['settings']
            cell = by_cell.setdefault((settings['column'], settings['row']), [])
            cell.append(result['metrics'])
        header = [
            '',
            'method',
            'parameters (M)',
            *(['paper'] * self._prints('parameters')),
            'seeds',
        ]
        if self._several:
            paper = ' (paper)' if self.published else ''
            header += [f'{label}{paper}' for label in self.metrics]
        else:
            header += ['last (%)', 'best (%)', *(['paper (%)'] if self.published else [])]
        table = Table([*header, 'TNS'])
        for column in columns:
            for method in methods:
                cell = by_cell.get((column, method), [])
                table.rows.append(self._row(column, method, cell))
        tables = {self.title: table}
        if self.correlate:
            for column in columns:
                cells = [by_cell.get((column, method), []) for method in methods]
                found = _correlation(cells)
                if found is not None:
                    tables[f'{self.columns[column]}: TNS against accuracy, over methods'] = found
        return tables

    def _prints(self, what: str) -> bool:
        return any(what in cell for row in self.published.values() for cell in row.values())

    @property
    def _several(self) -> bool:
        return len(self.metrics) > 1

    def _row(self, column: str, method: str, cell: list[dict]) -> list[str]:
        paper = self.published.get(method, {}).get(column, {})
        row = [self.columns[column], self.methods[method]]
        row.append(f'{cell[0]["parameters"] / 1e6:.2f}' if cell else '-')
        if self._prints('parameters'):
            row.append(f'{paper["parameters"]:.2f}')
        row.append(str(len(cell)))
        if self._several:
            theirs = [f' ({ap:.1f})' for ap in paper['ap']] if paper else [''] * len(self.metrics)
            for label, published_ap in zip(self.metrics, theirs, strict=True):
                row.append(spread([m[label] for m in cell], 1) + published_ap)
        else:
            row += [spread([m[name] for m in cell]) for name in ('last', 'best')]
            if self.published:
                row.append('{:.2f} ± {:.2f}'.format(*paper['accuracy']))
        row.append(spread([m['tns'] for m in cell if 'tns' in m], 4))
        return row


def _correlation(cells: list[list[dict]]) -> Table | None:
    """Correlations over methods of mean TNS and mean last accuracy; None for fewer than three."""
    import torch

    from mmstepnet.stiffness import rank_correlation

    pairs = [
        (statistics.fmean(m['tns'] for m in cell), statistics.fmean(m['last'] for m in cell))
        for cell in cells
        if cell and all('tns' in m for m in cell)
    ]
    if len(pairs) < 3:
        return None
    tns, accuracy = torch.tensor(pairs, dtype=torch.float64).T
    found = rank_correlation(tns, accuracy, nan_policy='omit')
    table = Table(['correlation', 'value', 'p', 'methods'])
    for name, value in zip(found._fields, found, strict=True):
        table.rows.append(
            [name.capitalize(), f'{value[0]:.3f}', f'{value[1]:.3f}', str(len(pairs))]
        )
    return table


@functools.cache
def count_parameters(config: str) -> int:
    """Trained and frozen parameters of a config's model."""
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from mmstepnet.registry import MODELS

    cfg = Config.fromfile(ROOT / config)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(dict(cfg.model, _scope_=cfg.default_scope))
    return sum(parameter.numel() for parameter in model.parameters())


def array_script(
    command: Sequence[str],
    indices: Sequence[int],
    folder: Path,
    name: str,
    gpus: int,
    cpus_per_gpu: int = 5,
    options: Sequence[str] = (),
) -> str:
    """A Slurm script whose array tasks each do one run.

    Args:
        command: What a task calls, with its index behind it.
        indices: Indices of the tasks, in order.
        folder: Where logs go.
        name: Name of the job.
        gpus: GPUs of a task.
        cpus_per_gpu: CPU cores a GPU.
        options: Further options of ``sbatch``.
    """
    lines = [
        f'--job-name={name}',
        f'--array={_ranges(indices)}',
        f'--output={_quoted(f"{folder}/%A_%a.log")}',
    ]
    lines += ['--nodes=1', '--ntasks=1', f'--cpus-per-task={max(gpus, 1) * cpus_per_gpu}']
    lines += [f'--gres=gpu:{gpus}'] if gpus else []
    lines += ['--requeue', *options]
    directives = '\n'.join(f'#SBATCH {line}' for line in lines)
    return (
        f'#!/usr/bin/env bash\n{directives}\n'
        f'set -euo pipefail\ncd {shlex.quote(str(Path.cwd()))}\n'
        f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"\n'
    )


def _quoted(text: str) -> str:
    """A word of an ``#SBATCH`` line, which Slurm splits at spaces outside of quotes."""
    return f'"{text}"' if ' ' in text else text


def _ranges(indices: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2, 5."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ','.join(f'{a}' if a == b else f'{a}-{b}' for a, b in ranges)


# Hours are estimates: from multiply-adds, for one GPU that does 10 TFLOP/s in single precision, a
# third of that on small pictures; for COCO what 1x trainings of such detectors usually take. Times
# of finished runs take their place.
TABLES = {
    'table1': PaperTable(
        title='Table 1: ResNet-164, top-1 accuracy',
        group='resnet164',
        config='classification/resnet164_{method}_164e_{column}.py',
        methods={method: LABELS[method] for method in published.TABLE1},
        columns=_SMALL,
        batch_size=128,
        gpu_hours=dict(cifar10=1.2, cifar100=1.2, stl10=1.1),
        published=published.TABLE1,
    ),
    'table2': PaperTable(
        title='Table 2: ImageNet, top-1 accuracy',
        group='imagenet',
        config='classification/{column}_{method}_120e_imagenet.py',
        methods={method: LABELS[method] for method in published.TABLE2},
        columns=dict(resnet34='ResNet-34', resnet50='ResNet-50'),
        batch_size=256,
        gpu_hours=dict(resnet34=94, resnet50=105),
        published=published.TABLE2,
        gpus_per_run=8,
    ),
    'table3': PaperTable(
        title='Table 3: COCO, Faster R-CNN, AP',
        group='coco',
        config='detection/faster_rcnn_{column}_{method}_1x_coco.py',
        methods={method: LABELS[method] for method in published.TABLE3},
        columns=dict(r50='ResNet-50', r101='ResNet-101'),
        batch_size=16,
        gpu_hours=dict(r50=80, r101=105),
        published=published.TABLE3,
        metrics=_COCO,
        scale=100,
        gpus_per_run=8,
        seeds=1,
    ),
    'table4': PaperTable(
        title='Table 4: what the adaptor sees and how it is built, ResNet-164, top-1 accuracy',
        group='resnet164',
        config='classification/resnet164_{method}_164e_{column}.py',
        methods=_ABLATION,
        columns=_SMALL,
        batch_size=128,
        gpu_hours=dict(cifar10=1.2, cifar100=1.2, stl10=1.1),
        published=published.TABLE4,
    ),
    'vit': PaperTable(
        title='Appendix G: vision transformers from scratch, top-1 accuracy',
        group='vit',
        config='classification/vit_{method}_200e_{column}.py',
        methods=dict(org='ViT', stepnet='ViT + StepNet'),
        columns=_SMALL,
        batch_size=128,
        gpu_hours=dict(cifar10=1.0, cifar100=1.0, stl10=0.1),
        published=published.VIT,
    ),
    'digits': PaperTable(
        title='Noisy digits, 20 of each class to train with: ResNet-20, top-1 accuracy',
        group='small',
        config='digits/resnet20_{method}_30e_{column}.py',
        methods=LABELS,
        columns={'digits-hard': 'digits'},
        batch_size=50,
        jobs=2,
        correlate=True,
    ),
    'cifar10-mini': PaperTable(
        title='CIFAR-10, 10,000 training pictures: ResNet-20, top-1 accuracy',
        group='small',
        config='cifar10_mini/resnet20_{method}_20e_{column}.py',
        methods={method: LABELS[method] for method in ('org', 'se', 'eca', 'srm', 'stepnet')},
        columns={'cifar10-mini': 'CIFAR-10'},
        batch_size=128,
        seeds=3,
        jobs=2,
        correlate=True,
    ),
    'digits-detection': PaperTable(
        title='Handwritten digits on 128x128 pages: Faster R-CNN with ResNet-18 from scratch, AP',
        methods={method: LABELS[method] for method in published.TABLE3},
        columns={'digits': 'digits'},
        correlate=True,
        **_SMALL_DETECTOR,
    ),
    'bccd': PaperTable(
        title='Blood cells (BCCD): Faster R-CNN with ResNet-18 from scratch, AP',
        methods={method: LABELS[method] for method in ('org', 'stepnet')},
        columns={'bccd': 'BCCD'},
        **_SMALL_DETECTOR,
    ),
}
