"""Two moons by self-, L2- and metric attention: accuracy, spread and speed of training."""

import argparse
from dataclasses import asdict
from pathlib import Path

from mmstepnet.utils.text_table import Table, spread

from .experiment import Experiment, metric, select
from .runs import Run

KERNELS = {'dot': 'self-attention', 'l2': 'L2 attention', 'metric': 'metric attention'}

# Settings that the text of the paper leaves open or that change what spread means.
MOONS = {
    'residual': ({}, 'Residual layers, the same points for every seed'),
    'plain': (dict(residual=False), 'Layers without identity, the same points for every seed'),
    'redrawn': (dict(data_seed=None), 'Residual layers, other points for every seed'),
    'digits': (
        dict(data='digits', embed_dims=32, test_points=450),
        'The digits as points with 64 coordinates, 400 to train with and 450 to test on',
    ),
}


def _runs(args: argparse.Namespace) -> list[Run]:
    from mmstepnet.analysis.moons import MoonsSettings

    runs = []
    for variant, (changes, _) in MOONS.items():
        for kernel in KERNELS:
            settings = asdict(MoonsSettings(kernel=kernel, steps=args.steps, **changes))
            for seed in range(args.seeds):
                runs.append(Run(kernel, variant, seed, args.out, options=settings))
    return runs


def _execute(run: Run, args: argparse.Namespace) -> dict:
    from mmstepnet.analysis.moons import MoonsSettings, train_moons

    return train_moons(MoonsSettings(**run.options), run.seed)[1]


def _tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
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
                    _reached(chosen),
                ]
            )
    return tables


def _reached(results: list[dict]) -> str:
    """Steps to 95 % of the seeds that got there, and how many did."""
    steps = [
        r['metrics']['steps_to_95']
        for r in results
        if r['metrics']['steps_to_95'] <= r['settings']['options']['steps']
    ]
    return f'{spread(steps, 0)} ({len(steps)} of {len(results)})'


def _figures(results: list[dict], out: Path) -> list[Path]:
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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--steps', type=int, default=300, help='optimiser steps (default: 300)')


EXPERIMENT = Experiment(
    help='two moons by self-, L2- and metric attention: accuracy, spread, speed of training',
    runs=_runs,
    execute=_execute,
    tables=_tables,
    figures=_figures,
    arguments=_arguments,
    seeds=10,
)
