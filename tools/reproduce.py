"""Reproduce a table: train what is missing of its runs, then print it with its spread.

A run that is finished is never repeated, one that was broken off goes on from its newest
checkpoint. Results, tables and figures lie in WORK_DIR/NAME.
"""

import os

# OpenMP reads these when torch loads it, so they stand before every other import.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MKL_NUM_THREADS', os.environ['OMP_NUM_THREADS'])
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import argparse
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mmstepnet.utils import experiments
from mmstepnet.utils.command_line import fail
from mmstepnet.utils.experiments import Run, RunError, Table, spread

KERNELS = {'dot': 'self-attention', 'l2': 'L2 attention', 'metric': 'metric attention'}


@dataclass(frozen=True)
class Experiment:
    """One sub-command.

    Args:
        help: A line about it.
        runs: The runs that the arguments ask for.
        execute: Does one run, see ``experiments.complete``.
        tables: Tables by title, from the results that are there.
        figures: Writes figures to a folder.
        arguments: Adds arguments of its own.
        seeds: Seeds by default.
    """

    help: str
    runs: Callable[[argparse.Namespace], list[Run]]
    execute: Callable[[Run, argparse.Namespace], dict]
    tables: Callable[[list[dict]], dict[str, Table]]
    figures: Callable[[list[dict], Path], list[Path]] = lambda results, out: []
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    seeds: int = 5


def select(results: list[dict], **wanted) -> list[dict]:
    """The results whose settings are as wanted."""
    return [r for r in results if all(r['settings'][k] == v for k, v in wanted.items())]


def metric(results: list[dict], name: str) -> list[float]:
    """A metric of each result."""
    return [r['metrics'][name] for r in results]


# Two moons -------------------------------------------------------------------------------------

# The three settings that the text of the paper leaves open or that change what spread means.
MOONS = {
    'residual': ({}, 'Residual layers, the same points for every seed'),
    'plain': (dict(residual=False), 'Layers without identity, the same points for every seed'),
    'redrawn': (dict(data_seed=None), 'Residual layers, other points for every seed'),
}


def moons_runs(args: argparse.Namespace) -> list[Run]:
    from mmstepnet.analysis.moons import MoonsSettings

    runs = []
    for variant, (changes, _) in MOONS.items():
        for kernel in KERNELS:
            settings = asdict(MoonsSettings(kernel=kernel, steps=args.steps, **changes))
            for seed in range(args.seeds):
                runs.append(Run(kernel, variant, seed, args.out, options=settings))
    return runs


def moons_execute(run: Run, args: argparse.Namespace) -> dict:
    from mmstepnet.analysis.moons import MoonsSettings, train_moons

    return train_moons(MoonsSettings(**run.options), run.seed)[1]


def moons_tables(results: list[dict]) -> dict[str, Table]:
    header = ['attention', 'seeds', 'accuracy (%)', 'best (%)', 'with training points (%)']
    header += ['training (%)', 'loss', 'steps to 95 %']
    tables = {}
    for variant, (_, title) in MOONS.items():
        table = tables[title] = Table(header)
        for kernel, name in KERNELS.items():
            chosen = select(results, row=kernel, column=variant)
            if not chosen:
                continue
            table.rows.append(
                [
                    name,
                    str(len(chosen)),
                    spread(metric(chosen, 'accuracy'), 1),
                    spread(metric(chosen, 'best'), 1),
                    spread(metric(chosen, 'accuracy_together'), 1),
                    spread(metric(chosen, 'train_accuracy'), 1),
                    spread(metric(chosen, 'loss'), 3),
                    reached(chosen),
                ]
            )
    return tables


def reached(results: list[dict]) -> str:
    """Steps to 95 % of the seeds that got there, and how many did."""
    steps = [
        r['metrics']['steps_to_95']
        for r in results
        if r['metrics']['steps_to_95'] <= r['settings']['options']['steps']
    ]
    return f'{spread(steps, 0)} ({len(steps)} of {len(results)})'


def moons_figures(results: list[dict], out: Path) -> list[Path]:
    from mmstepnet.visualization.attention_figures import training_curves_figure
    from mmstepnet.visualization.figures import save_figure

    files = []
    for variant in MOONS:
        groups = {
            name: [r['curves'] for r in chosen]
            for kernel, name in KERNELS.items()
            if (chosen := select(results, row=kernel, column=variant))
        }
        if groups:
            figure = training_curves_figure(groups, xlabel='optimiser step')
            files += save_figure(figure, out / f'moons_{variant}')
    return files


def moons_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--steps', type=int, default=300, help='optimiser steps (default: 300)')


# Attention on the digits -----------------------------------------------------------------------

DIGITS = {
    'resnet20': ('ResNet-20', 'configs/digits/resnet20_org_12e_digits.py'),
    'resnet20-stepnet': ('ResNet-20 + StepNet', 'configs/digits/resnet20_stepnet_12e_digits.py'),
    'vit-dot': ('ViT, self-attention', 'configs/attention/vit_dot_12e_digits.py'),
    'vit-l2': ('ViT, L2 attention', 'configs/attention/vit_l2_12e_digits.py'),
    'vit-metric': ('ViT, metric attention', 'configs/attention/vit_metric_12e_digits.py'),
    'attentionconv': (
        'AttentionConvNet',
        'configs/attention/attentionconv_quadratic_12e_digits.py',
    ),
}
TOP1 = 'accuracy/top1'


def digits_runs(args: argparse.Namespace) -> list[Run]:
    # Seed by seed, so that a table of fewer seeds is there early.
    return [
        Run(row, 'digits', seed, args.out, config)
        for seed in range(args.seeds)
        for row, (_, config) in DIGITS.items()
    ]


def digits_execute(run: Run, args: argparse.Namespace) -> dict:
    found = experiments.train(run)
    metrics = experiments.last_and_best(found, TOP1)
    metrics |= {k: v for k, v in found[-1].items() if k.startswith('stiffness/')}
    curves = dict(
        step=[line['step'] for line in found],
        accuracy=[line[TOP1] for line in found],
        loss=experiments.epoch_losses(run.work_dir),
    )
    model, images = load_trained(run)
    metrics['parameters'] = sum(p.numel() for p in model.parameters())
    return dict(metrics=metrics, curves=curves, layers=layer_metrics(model, images))


def load_trained(run: Run) -> tuple:
    """The trained classifier of a run in evaluation mode, and its normalised test pictures."""
    from mmengine.config import Config
    from mmengine.dataset import pseudo_collate
    from mmengine.registry import DATASETS, init_default_scope

    from mmstepnet.registry import MODELS
    from mmstepnet.utils.checkpoint import newest_checkpoint

    cfg = Config.fromfile(experiments.ROOT / run.config)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(
        dict(cfg.model, _scope_=cfg.default_scope, data_preprocessor=cfg.data_preprocessor)
    )
    path, content, _ = newest_checkpoint(run.work_dir)
    if path is None:
        raise RunError(f'{run.work_dir} holds no checkpoint that can be read')
    model.load_state_dict(content['state_dict'])
    model.eval()
    dataset = DATASETS.build(dict(cfg.test_dataloader.dataset, _scope_=cfg.default_scope))
    batch = pseudo_collate([dataset[i] for i in range(len(dataset))])
    return model, model.data_preprocessor(batch)['inputs']


def layer_metrics(model, images) -> dict[str, list[float]]:
    """Geometry of the attention and clustering of the tokens by layer, mean over test pictures.

    Empty for a network without :class:`MetricAttention`.
    """
    from mmstepnet.analysis.attention_geometry import (
        attention_geometry,
        token_clustering,
        trace_layers,
    )
    from mmstepnet.models.layers import MetricAttention

    if not any(isinstance(module, MetricAttention) for module in model.modules()):
        return {}
    scores, states = trace_layers(model.backbone, model.backbone.layers, images)
    geometry = [attention_geometry(layer) for layer in scores]
    found = {
        name: [getattr(layer, name).mean().item() for layer in geometry]
        for name in ('asymmetry', 'negative', 'triangle', 'neighbours', 'spread')
    }
    clustering = token_clustering(states)
    for name in ('similarity', 'spread', 'rank', 'clusters'):
        found[f'token_{name}'] = getattr(clustering, name).mean(1).tolist()
    return found


def digits_tables(results: list[dict]) -> dict[str, Table]:
    accuracy = Table(
        ['network', 'parameters', 'seeds', 'accuracy (%)', 'best epoch (%)', 'TNS', 'mean NSI']
    )
    geometry = Table(
        ['network', 'layer', 'asymmetry', 'negative (%)', 'triangle (%)', 'neighbours', 'mixing']
    )
    for row, (name, _) in DIGITS.items():
        chosen = select(results, row=row)
        if not chosen:
            continue
        accuracy.rows.append(
            [
                name,
                f'{chosen[0]["metrics"]["parameters"]:,}',
                str(len(chosen)),
                spread(metric(chosen, 'last')),
                spread(metric(chosen, 'best')),
                spread(metric(chosen, 'stiffness/tns'), 3),
                spread(metric(chosen, 'stiffness/nsi_mean'), 3),
            ]
        )
        for layer in range(len(chosen[0]['layers'].get('asymmetry', []))):
            values = {
                key: [result['layers'][key][layer] for result in chosen]
                for key in ('asymmetry', 'negative', 'triangle', 'neighbours', 'spread')
            }
            geometry.rows.append(
                [
                    name,
                    str(layer + 1),
                    spread(values['asymmetry'], 3),
                    spread([100 * v for v in values['negative']], 2),
                    spread([100 * v for v in values['triangle']], 2),
                    spread(values['neighbours'], 2),
                    spread(values['spread'], 3),
                ]
            )
    return {
        'Digits: accuracy on 450 digits of other writers, and stiffness': accuracy,
        'Digits: what the attention layers measure': geometry,
    }


def digits_figures(results: list[dict], out: Path) -> list[Path]:
    import torch

    from mmstepnet.visualization.attention_figures import depth_figure, training_curves_figure
    from mmstepnet.visualization.figures import save_figure

    chosen = {name: select(results, row=row) for row, (name, _) in DIGITS.items()}
    chosen = {name: found for name, found in chosen.items() if found}
    groups = {name: [r['curves'] for r in found] for name, found in chosen.items()}
    files = save_figure(training_curves_figure(groups, xlabel='epoch'), out / 'digits_training')
    vits = {name: found for name, found in chosen.items() if found[0]['layers']}
    labels = dict(
        similarity='mean cosine similarity of tokens',
        rank='effective rank of the tokens',
        clusters='clusters of tokens',
    )
    for key, label in labels.items() if vits else ():
        series = {
            name: torch.tensor([r['layers'][f'token_{key}'] for r in found]).T
            for name, found in vits.items()
        }
        files += save_figure(depth_figure(series, label), out / f'digits_token_{key}')
    return files


EXPERIMENTS = {
    'moons': Experiment(
        help='two moons by self-, L2- and metric attention: accuracy, spread, speed of training',
        runs=moons_runs,
        execute=moons_execute,
        tables=moons_tables,
        figures=moons_figures,
        arguments=moons_arguments,
        seeds=10,
    ),
    'digits-attention': Experiment(
        help='attention and convolution on the digits: accuracy, stiffness, geometry of attention',
        runs=digits_runs,
        execute=digits_execute,
        tables=digits_tables,
        figures=digits_figures,
        seeds=3,
    ),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest='name', required=True, metavar='NAME')
    for name, experiment in EXPERIMENTS.items():
        command = commands.add_parser(name, help=experiment.help, description=experiment.help)
        command.add_argument('--work-dir', type=Path, default=Path('work_dirs/reproduce'))
        command.add_argument(
            '--seeds', type=int, default=experiment.seeds, help='seeds 0 .. SEEDS - 1 of each row'
        )
        command.add_argument(
            '--collect', action='store_true', help='train nothing, print what is there'
        )
        command.add_argument(
            '--dry-run', action='store_true', help='list the runs that are missing and stop'
        )
        experiment.arguments(command)
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f'--seeds must be at least 1, got {args.seeds}')
    args.out = args.work_dir / args.name
    return args


def main() -> None:
    args = parse_args()
    experiment = EXPERIMENTS[args.name]
    runs = experiment.runs(args)
    try:
        if args.dry_run:
            for run in runs:
                if experiments.read_result(run) is None:
                    command = experiments.train_command(run) if run.config else []
                    print(f'{run.work_dir}  {shlex.join(command)}'.rstrip())
            return
        if not args.collect:
            experiments.complete(runs, lambda run: experiment.execute(run, args))
        results = experiments.finished(runs)
    except RunError as error:
        fail(error)
    if not results:
        fail(f'no run of {args.name} is finished in {args.out}: run it without --collect')
    for i, (title, table) in enumerate(experiment.tables(results).items()):
        table.write(args.out / (args.name if i == 0 else f'{args.name}_{i + 1}'))
        print(f'\n{title}\n\n{table.text()}')
    for file in experiment.figures(results, args.out / 'figures'):
        print(file)


if __name__ == '__main__':
    main()
