"""Reproduce a table: train what is missing of its runs, then print it with its spread.

A run that is finished is never repeated, one that was broken off goes on from its newest
checkpoint. Tables and figures lie in WORK_DIR/NAME.
"""

import os

# OpenMP reads these when torch loads it, so they stand before every other import.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MKL_NUM_THREADS', os.environ['OMP_NUM_THREADS'])
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import argparse
import math
import queue
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mmstepnet.utils import experiments
from mmstepnet.utils.command_line import fail
from mmstepnet.utils.experiments import Run, RunError, Table, spread
from mmstepnet.utils.paper_tables import TABLES, PaperTable, array_script

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
        workers: Runs at the same time.
        command: The command of a run with a config.
        summary: What is to be said about the missing runs of a dry run.
    """

    help: str
    runs: Callable[[argparse.Namespace], list[Run]]
    execute: Callable[[Run, argparse.Namespace], dict]
    tables: Callable[[list[dict], argparse.Namespace], dict[str, Table]]
    figures: Callable[[list[dict], Path], list[Path]] = lambda results, out: []
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    seeds: int = 5
    workers: Callable[[argparse.Namespace], int] = lambda args: 1
    command: Callable[[Run, argparse.Namespace], list[str]] = lambda run, args: (
        experiments.train_command(run)
    )
    summary: Callable[[list[Run], argparse.Namespace], str] = lambda missing, args: (
        f'{len(missing)} runs are missing'
    )


def select(results: list[dict], **wanted) -> list[dict]:
    """The results whose settings are as wanted."""
    return [r for r in results if all(r['settings'][k] == v for k, v in wanted.items())]


def metric(results: list[dict], name: str) -> list[float]:
    """A metric of each result."""
    return [r['metrics'][name] for r in results]


# Two moons -------------------------------------------------------------------------------------

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


def moons_tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
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
    'vit-metric-scaled': (
        'ViT, metric attention / 16',
        'configs/attention/vit_metric_scaled_12e_digits.py',
    ),
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


def digits_tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
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
    for row, side in (('attentionconv', 8), ('vit-metric', 4), ('vit-dot', 4)):
        if found := select(results, row=row, column='digits'):
            run = Run(**found[0]['settings'], root=out.parent)
            figure = digits_attention_maps(run, side)
            files += save_figure(figure, out / f'digits_attention_{row}')
    return files


def digits_attention_maps(run: Run, side: int):
    """What each head of a trained network gives to the query near a test picture's middle."""
    import torch

    from mmstepnet.models.layers import MetricAttention, RelativeAttention2d
    from mmstepnet.visualization.attention_figures import attention_maps_figure

    model, images = load_trained(run)
    weights = []

    def note(layer, args):
        # forward itself, since calling the layer would run this hook again.
        weights.append(layer.forward(args[0], return_attention=True)[1][0])

    for layer in model.modules():
        if isinstance(layer, MetricAttention | RelativeAttention2d):
            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        model.backbone(images[:1])
    return attention_maps_figure(weights, (side // 2, side // 2), (side, side), images[0, 0])


# Diffusion -------------------------------------------------------------------------------------

# Manifold, whether points are uniform, grid for the quadrature.
DIFFUSION = {
    'circle, uniform': ('CIRCLE', True, (1000,)),
    'circle, not uniform': ('CIRCLE', False, (1000,)),
    'sphere, uniform': ('SPHERE', True, (150, 300)),
    'sphere, not uniform': ('SPHERE', False, (150, 300)),
    'torus, uniform': ('TORUS', True, (360, 180)),
    'torus, not uniform': ('TORUS', False, (360, 180)),
}
NUMBERS = (250, 1000, 4000, 16000)
QUERIES = {'CIRCLE': [[0.3], [1.1], [2.5], [4.0]]}
QUERIES['SPHERE'] = QUERIES['TORUS'] = [[1.2, 0.3], [1.7, 2.0], [0.9, 4.0]]


def diffusion_runs(args: argparse.Namespace) -> list[Run]:
    exact = [Run(row, 'quadrature', 0, args.out) for row in DIFFUSION]
    return exact + [
        Run(f'{number} points', 'random', seed, args.out)
        for number in NUMBERS
        for seed in range(args.seeds)
    ]


def diffusion_execute(run: Run, args: argparse.Namespace) -> dict:
    import torch

    from mmstepnet.analysis import diffusion

    def function(u):
        # A product of two coordinates in space where there are two angles; cos on the circle.
        return u[0].cos() if len(u) == 1 else u[0].sin() * u[1].cos() * u[0].cos()

    def tilt(u):
        return 0.7 * u[0].cos()

    if run.column == 'quadrature':
        name, uniform, grid = DIFFUSION[run.row]
        manifold = getattr(diffusion, name)
        eps = torch.logspace(-1, -4 if name == 'CIRCLE' else -2.5, 13).tolist()
        keys, density, exact = manifold.grid(*grid), None if uniform else tilt, True
    else:
        name, manifold = 'CIRCLE', diffusion.CIRCLE
        eps = torch.logspace(-0.25, -3, 12).tolist()
        generator = torch.Generator().manual_seed(run.seed)
        keys, density, exact = manifold.sample(int(run.row.split()[0]), generator), None, False
    queries = torch.tensor(QUERIES[name], dtype=torch.float64)
    errors = [
        diffusion.step_error(manifold, function, queries, keys, e, density, exact) for e in eps
    ]
    metrics = dict(
        # Between the smallest step sizes, where higher orders are gone.
        order=math.log(errors[-4] / errors[-1]) / math.log(eps[-4] / eps[-1]),
        constant=errors[-1] / eps[-1] ** 2,
    )
    return dict(metrics=metrics, curves=dict(eps=eps, error=errors))


def generator_errors(result: dict) -> list[float]:
    """Error of the generator that a step implies, (A h - h) / (eps / 2), at each step size.

    A step's own error goes to 0 with eps however few points there are, this one doesn't.
    """
    curves = result['curves']
    return [2 * error / eps for eps, error in zip(curves['eps'], curves['error'], strict=True)]


def diffusion_tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
    exact = Table(['points', 'order in eps', 'error / eps^2'])
    for result in select(results, column='quadrature'):
        metrics = result['metrics']
        exact.rows.append(
            [result['settings']['row'], f'{metrics["order"]:.3f}', f'{metrics["constant"]:.4f}']
        )
    random = Table(['random points on the circle', 'seeds', 'error of the generator', 'at eps'])
    for number in NUMBERS:
        chosen = select(results, column='random', row=f'{number} points')
        if chosen:
            errors = [generator_errors(result) for result in chosen]
            columns = list(zip(*errors, strict=True))
            best = min(range(len(columns)), key=lambda i: sum(columns[i]))
            eps = chosen[0]['curves']['eps'][best]
            random.rows.append(
                [str(number), str(len(chosen)), spread(columns[best], 3), f'{eps:.3f}']
            )
    return {
        'Quadrature: order of the error of an attention step against diffusion': exact,
        'Random points: the step size that balances both errors': random,
    }


def diffusion_figures(results: list[dict], out: Path) -> list[Path]:
    from mmstepnet.visualization.attention_figures import diffusion_figure
    from mmstepnet.visualization.figures import save_figure

    files = []
    square = r'$\varepsilon^2 / 8$', 1 / 8, 2
    exact = select(results, column='quadrature')
    if exact:
        curves = {r['settings']['row']: (r['curves']['eps'], r['curves']['error']) for r in exact}
        files += save_figure(diffusion_figure(curves, square), out / 'diffusion_quadrature')
    curves = {}
    for number in NUMBERS:
        chosen = select(results, column='random', row=f'{number} points')
        if chosen:
            columns = zip(*(generator_errors(result) for result in chosen), strict=True)
            mean = [sum(column) / len(chosen) for column in columns]
            curves[f'{number} random points'] = chosen[0]['curves']['eps'], mean
    if curves:
        linear = r'$\varepsilon / 4$', 1 / 4, 1
        figure = diffusion_figure(curves, linear, 'error of the generator')
        files += save_figure(figure, out / 'diffusion_random')
    return files


# Tables of the StepNet paper ---------------------------------------------------------------------


def paper_table(name: str) -> Experiment:
    """The sub-command of one of ``mmstepnet.utils.paper_tables.TABLES``."""
    table = TABLES[name]
    # Each worker takes a group of GPUs for the time of a run.
    free: queue.SimpleQueue[str] = queue.SimpleQueue()

    def arguments(parser: argparse.ArgumentParser) -> None:
        paper_arguments(parser, table)

    def runs(args: argparse.Namespace) -> list[Run]:
        settle_gpus(args, table)
        return table.runs(args.work_dir, args.data, args.methods, args.seeds)

    def workers(args: argparse.Namespace) -> int:
        groups = gpu_groups(args)
        for group in groups:
            free.put(group)
        return len(groups)

    def execute(run: Run, args: argparse.Namespace) -> dict:
        group = free.get()
        try:
            return table.execute(run, args.gpus_per_run, dict(CUDA_VISIBLE_DEVICES=group))
        finally:
            free.put(group)

    def command(run: Run, args: argparse.Namespace) -> list[str]:
        options = table.machine_options(args.gpus_per_run)
        return experiments.train_command(run, args.gpus_per_run, options)

    def summary(missing: list[Run], args: argparse.Namespace) -> str:
        text = f'{len(missing)} runs are missing'
        if table.gpu_hours:
            # Methods that are not asked for tell of the machine's speed too.
            every = table.runs(args.work_dir, [*table.columns], [*table.methods], args.seeds)
            hours = table.hours(missing, experiments.finished(every))
            text += f', about {hours:,.1f} GPU hours (an estimate)'
        return text

    return Experiment(
        help=table.title,
        runs=runs,
        execute=execute,
        tables=lambda results, args: table.tables(results, args.data, args.methods),
        arguments=arguments,
        seeds=table.seeds,
        workers=workers,
        command=command,
        summary=summary,
    )


def paper_arguments(parser: argparse.ArgumentParser, table: PaperTable) -> None:
    add = parser.add_argument
    for flag, names in (('--data', table.columns), ('--methods', table.methods)):
        add(flag, nargs='+', choices=[*names], default=[*names], metavar='NAME',
            help=f'some of {", ".join(names)} (default: all)')  # fmt: skip
    add('--gpus', type=int, help='GPUs to use, 0 for the CPU (default: all that are there)')
    add('--gpus-per-run', type=int,
        help=f'GPUs of each run, as many runs at a time as fit (default: {table.gpus_per_run} '
        f'or fewer; the batch of {table.batch_size} pictures is shared among them)')  # fmt: skip
    add('--jobs', type=int, default=table.jobs,
        help=f'runs at a time on the CPU (default: {table.jobs})')  # fmt: skip
    add('--launcher', choices=('none', 'slurm'), default='none',
        help='slurm: submit an array job with a task for each missing run')  # fmt: skip
    add('--sbatch', nargs='+', default=[], metavar='OPTION',
        help='options of that job, as "--sbatch=--partition=gpu" "--sbatch=--time=2-0"',
        action='extend')  # fmt: skip
    add('--task', type=int, help=argparse.SUPPRESS)


def settle_gpus(args: argparse.Namespace, table: PaperTable) -> None:
    """Fill in ``args.gpus`` and ``args.gpus_per_run``; ends the process where they don't fit."""
    if args.gpus is None:
        import torch

        elsewhere = args.launcher == 'slurm' or (args.dry_run and table.gpu_hours)
        args.gpus = torch.cuda.device_count() or (
            (args.gpus_per_run or table.gpus_per_run) if elsewhere else 0
        )
    if args.gpus_per_run is None:
        args.gpus_per_run = table.fitting_gpus(args.gpus)
    if args.jobs < 1:
        fail(f'--jobs must be at least 1, got {args.jobs}')
    if args.gpus < 0 or not min(args.gpus, 1) <= args.gpus_per_run <= args.gpus:
        fail(
            f'--gpus must be at least 0 and --gpus-per-run between 1 and --gpus, got {args.gpus} '
            f'and {args.gpus_per_run}'
        )
    try:
        table.machine_options(args.gpus_per_run)
    except ValueError as error:
        fail(f'--gpus-per-run: {error}')


def gpu_groups(args: argparse.Namespace) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each run at the same time."""
    if args.gpus == 0:
        return [''] * args.jobs
    given = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = given.split(',') if given else [str(i) for i in range(args.gpus)]
    if len(names) < args.gpus:
        fail(f'--gpus {args.gpus}, but CUDA_VISIBLE_DEVICES={given} names only {len(names)}')
    size = args.gpus_per_run
    return [','.join(names[i : i + size]) for i in range(0, args.gpus - size + 1, size)]


def submit(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Write a Slurm array job of the missing runs and submit it; a dry run prints it."""
    missing = [i for i, run in enumerate(runs) if experiments.read_result(run) is None]
    if not missing:
        print('no run is missing')
        return
    command = [sys.executable, str(Path(__file__).resolve()), args.name]
    command += ['--work-dir', str(args.work_dir.resolve()), '--seeds', str(args.seeds)]
    command += ['--data', *args.data, '--methods', *args.methods]
    command += ['--gpus', str(args.gpus_per_run), '--gpus-per-run', str(args.gpus_per_run)]
    folder = (args.out / 'slurm').resolve()
    script = array_script(
        [*command, '--task'], missing, folder, args.name, args.gpus_per_run, options=args.sbatch
    )
    if args.dry_run:
        print(script, end='')
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'{args.name}.sbatch'
    path.write_text(script)
    if shutil.which('sbatch') is None:
        fail(f'there is no sbatch here: on the login node of the cluster, run: sbatch {path}')
    raise SystemExit(subprocess.run(['sbatch', str(path)]).returncode)


EXPERIMENTS = {name: paper_table(name) for name in TABLES} | {
    'diffusion': Experiment(
        help='one attention step against diffusion on circle, sphere and torus',
        runs=diffusion_runs,
        execute=diffusion_execute,
        tables=diffusion_tables,
        figures=diffusion_figures,
        seeds=10,
    ),
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
        seeds=5,
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


def list_missing(experiment: Experiment, runs: Sequence[Run], args: argparse.Namespace) -> None:
    missing = [run for run in runs if experiments.read_result(run) is None]
    for run in missing:
        command = experiment.command(run, args) if run.config else []
        print(f'{run.work_dir}  {shlex.join(command)}'.rstrip())
    print(experiment.summary(missing, args))


def main() -> None:
    # As Ctrl-C: what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = parse_args()
    experiment = EXPERIMENTS[args.name]
    runs = experiment.runs(args)
    task = getattr(args, 'task', None)
    if task is not None:
        if not 0 <= task < len(runs):
            fail(f'--task must lie in 0..{len(runs) - 1}, got {task}')
        runs = runs[task : task + 1]
    try:
        if getattr(args, 'launcher', 'none') == 'slurm':
            return submit(runs, args)
        if args.dry_run:
            return list_missing(experiment, runs, args)
        if not args.collect:
            experiments.complete(
                runs,
                lambda run: experiment.execute(run, args),
                workers=experiment.workers(args),
            )
        results = experiments.finished(runs)
    except RunError as error:
        fail(error)
    if task is not None:
        return
    if not results:
        fail(f'no run of {args.name} is finished in {args.work_dir}: run it without --collect')
    for i, (title, table) in enumerate(experiment.tables(results, args).items()):
        table.write(args.out / (args.name if i == 0 else f'{args.name}_{i + 1}'))
        print(f'\n{title}\n\n{table.text()}')
    for file in experiment.figures(results, args.out / 'figures'):
        print(file)


if __name__ == '__main__':
    main()
