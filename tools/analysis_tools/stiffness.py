"""Measure the stiffness of a trained model and write a report with figures.

The numbers are those of StiffnessHook on the same checkpoint and data. Several processes:
python tools/launch.py GPUS tools/analysis_tools/stiffness.py CONFIG CHECKPOINT --launcher pytorch
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import copy
import re

import numpy as np
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mmstepnet.engine.hooks import StiffnessHook
from mmstepnet.stiffness import TrajectoryRecorder
from mmstepnet.utils import checkpoint as ckpt
from mmstepnet.utils.command_line import (
    ArgumentParser,
    add_settings_argument,
    build_model,
    build_runner,
    fail,
    load_config,
    local_rank,
    make_folder,
    reason,
    set_loader_defaults,
    set_work_dir,
    type_name,
)
from mmstepnet.utils.data_check import check_dataset_cfg
from mmstepnet.utils.distributed import (
    add_launcher_arguments,
    process_group,
    set_rank_variables,
)


def parse_args(argv=None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        '--split',
        choices=('val', 'test', 'train'),
        default='val',
        help='which pictures; train sees its pictures without augmentation (default: val)',
    )
    parser.add_argument(
        '--max-samples',
        type=int,
        metavar='N',
        help='measure N pictures evenly spread over the split; leaves the accuracy out',
    )
    parser.add_argument(
        '--step',
        choices=('attention', 'unit'),
        default='attention',
        help='NSI as ||f|| / ||x|| (attention, default) or as ||f dt|| / ||x|| (unit)',
    )
    parser.add_argument(
        '--blocks',
        nargs='+',
        metavar='NAME',
        help="a pattern of module names ('backbone.layer*.*') or names; found by themselves for "
        'the networks that docs/stiffness.md lists',
    )
    parser.add_argument(
        '--include-first',
        action='store_true',
        help='record the first block of every stage too, which the paper leaves out',
    )
    parser.add_argument(
        '--nan-policy',
        choices=('raise', 'omit'),
        default='raise',
        help='what to do about a picture with NaN or Inf features or a zero state: end (default), '
        'or leave it out and count it',
    )
    parser.add_argument(
        '--out',
        metavar='FILE.json',
        help='the report; samples (.npz) and a folder of figures go beside it (default: '
        'WORK_DIR/stiffness/CHECKPOINT_SPLIT.json, with other choices than the default ones behind '
        'SPLIT)',
    )
    parser.add_argument('--no-figures', action='store_true', help='write numbers only')
    parser.add_argument(
        '--work-dir', help='where the report and logs go (default: work_dirs/CONFIG_NAME)'
    )
    parser.add_argument('--amp', action='store_true', help='evaluate in half precision')
    add_settings_argument(parser, 'val_dataloader.batch_size=4')
    add_launcher_arguments(parser)
    args = parser.parse_args(argv)
    if args.out is not None and not args.out.endswith('.json'):
        parser.error(f'--out must end in .json, got {args.out}')
    if args.max_samples is not None and args.max_samples < 2:
        parser.error(f'--max-samples must be at least 2, got {args.max_samples}')
    return args


def choices(args: argparse.Namespace) -> list[str]:
    """What is measured otherwise than by default, for a report's name."""
    found = [] if args.step == 'attention' else [args.step]
    found += ['with-first'] if args.include_first else []
    found += [] if args.blocks is None else [re.sub(r'[^\w.-]+', '-', ' '.join(args.blocks))]
    return found + ([] if args.max_samples is None else [f'{args.max_samples}-samples'])


def recording(args: argparse.Namespace) -> dict:
    """The arguments of the recorder."""
    blocks = args.blocks
    if blocks is not None and len(blocks) == 1:
        blocks = blocks[0]
    return dict(
        step=args.step,
        blocks=blocks,
        exclude_first=not args.include_first,
        nan_policy=args.nan_policy,
    )


def apply_arguments(cfg: Config, args: argparse.Namespace) -> None:
    """Turn the config into one whose test evaluates the chosen pictures."""
    cfg.launcher = args.launcher
    set_work_dir(cfg, args.config, args.work_dir)
    cfg.load_from, cfg.resume = args.checkpoint, False
    cfg.log_level = 'WARNING'
    cfg.visualizer = dict(type='mmengine.Visualizer', vis_backends=[])
    hooks = cfg.get('default_hooks', {})
    hooks.pop('visualization', None)
    cfg.default_hooks = dict(hooks, logger=None)  # a progress bar takes its place
    cfg.custom_hooks = [
        hook for hook in cfg.get('custom_hooks', []) if type_name(hook['type']) != 'StiffnessHook'
    ]

    evaluated = 'val' if args.split == 'train' else args.split
    for key in {f'{args.split}_dataloader', f'{evaluated}_dataloader'}:
        if cfg.get(key) is None:
            fail(f'config {args.config} has no `{key}`')
    loader = copy.deepcopy(cfg[f'{evaluated}_dataloader'])
    evaluator = copy.deepcopy(cfg.get(f'{evaluated}_evaluator')) or []
    if args.split == 'train':
        pipeline = _innermost(loader.dataset).get('pipeline')
        loader.dataset = copy.deepcopy(cfg.train_dataloader.dataset)
        while 'dataset' in loader.dataset:  # repetitions and rebalancing are for training
            loader.dataset = loader.dataset.dataset
        for part in _leaves(loader.dataset):
            part.pipeline = pipeline
    loader.sampler = dict(type='DefaultSampler', shuffle=False)
    if args.split == 'train' or args.max_samples is not None:
        evaluator = []  # annotations of the other pictures would count as missed
    set_loader_defaults(loader, cfg)
    evaluator = evaluator if isinstance(evaluator, list | tuple) else [evaluator]
    cfg.test_dataloader = loader
    cfg.test_evaluator = [
        *(metric for metric in evaluator if type_name(metric['type']) != 'StiffnessMetric'),
        dict(type='mmstepnet.StiffnessMetric', **recording(args)),
    ]
    cfg.test_cfg = dict(type='TestLoop', fp16=args.amp)
    for key in (
        *('train_dataloader', 'train_cfg', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr'),
        *('val_dataloader', 'val_cfg', 'val_evaluator'),
    ):
        cfg[key] = None


def _innermost(dataset: Config) -> Config:
    while 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


def _leaves(dataset: Config) -> list[Config]:
    dataset = _innermost(dataset)
    if 'datasets' in dataset:
        return [leaf for part in dataset.datasets for leaf in _leaves(part)]
    return [dataset]


def check(cfg: Config, args: argparse.Namespace) -> None:
    """Everything that can be known to be wrong before the work directory is touched."""
    try:
        check_dataset_cfg(cfg, splits=('test',))
        content = ckpt.read_checkpoint(cfg.load_from)
        model = build_model(cfg)
        ckpt.check_same_network(model, content, cfg.load_from)
        TrajectoryRecorder(model, **recording(args))
    except (FileNotFoundError, ValueError) as error:
        fail(reason(error))


def take_some(cfg: Config, count: int) -> None:
    """Cut the test data set to ``count`` pictures, evenly spread: many are sorted by class."""
    dataset = _innermost(cfg.test_dataloader.dataset)
    if 'datasets' in dataset:
        fail('--max-samples does not work on a concatenation of data sets')
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    whole = copy.deepcopy(dataset)
    given = whole.pop('indices', None)
    chosen = list(range(len(DATASETS.build(whole))))
    if isinstance(given, int):
        chosen = chosen[:given] if given >= 0 else chosen[given:]
    elif given is not None:
        chosen = list(given)
    if count < len(chosen):
        places = np.linspace(0, len(chosen) - 1, count).round().astype(int)
        dataset.indices = [chosen[place] for place in places]


class CommandLineHook(StiffnessHook):
    """Writes where it is told, and moves a progress bar."""

    def __init__(self, path: Path, split: str, progress: Progress, **kwargs):
        super().__init__(**kwargs)
        self.path, self.split, self.progress = path, split, progress

    def report_path(self, runner, split, place) -> Path:
        return self.path

    def report_info(self, runner, split, place) -> dict:
        return dict(super().report_info(runner, split, place), split=self.split)

    def before_test_epoch(self, runner) -> None:
        super().before_test_epoch(runner)
        self.task = self.progress.add_task('batches', total=len(runner.test_dataloader))

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.progress.advance(self.task)


def main() -> None:
    args = parse_args()
    set_rank_variables(args.launcher)
    cfg = load_config(args.config, args.cfg_options)
    apply_arguments(cfg, args)
    if local_rank() == 0:
        check(cfg, args)
        make_folder(cfg.work_dir)
    with process_group(args.launcher, cfg):
        measure(cfg, args)


def measure(cfg: Config, args: argparse.Namespace) -> None:
    if args.max_samples is not None:
        take_some(cfg, args.max_samples)
    runner = build_runner(cfg)
    name = '_'.join([Path(args.checkpoint).stem, args.split, *choices(args)]) + '.json'
    path = Path(args.out or Path(cfg.work_dir) / 'stiffness' / name)
    progress = Progress(
        TextColumn('{task.description}'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn('left:'),
        TimeRemainingColumn(),
        disable=runner.rank != 0,
    )
    hook = CommandLineHook(
        path, args.split, progress, figures=not args.no_figures, **recording(args)
    )
    runner.register_hook(hook)
    try:
        with progress:
            metrics = runner.test()
    except ValueError as error:
        fail(reason(error))
    if runner.rank == 0:
        show(metrics, runner.test_evaluator.metrics[-1].measurement, path)


def show(metrics: dict, measurement, path: Path) -> None:
    """Print what was measured."""
    count, omitted = len(measurement.nsi), measurement.num_omitted
    left_out = f', {omitted} left out (no NSI)' if omitted else ''
    print(f'{count} samples{left_out}, {len(measurement.names)} blocks, step={measurement.step}')
    width = max(map(len, metrics))
    for key, value in metrics.items():
        print(f'  {key:{width}}  {value:.6g}' if isinstance(value, float) else f'  {key}  {value}')
    print(f'report: {path}')


if __name__ == '__main__':
    main()
