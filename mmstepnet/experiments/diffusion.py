"""One attention step against diffusion on the circle, the sphere and the torus."""

import argparse
import math
from pathlib import Path

from mmstepnet.utils.text_table import Table, spread

from .experiment import Experiment, select
from .runs import Run

# Manifold, whether points are uniform, grid for the quadrature.
MANIFOLDS = {
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


def _runs(args: argparse.Namespace) -> list[Run]:
    exact = [Run(row, 'quadrature', 0, args.out) for row in MANIFOLDS]
    return exact + [
        Run(f'{number} points', 'random', seed, args.out)
        for number in NUMBERS
        for seed in range(args.seeds)
    ]


def _execute(run: Run, args: argparse.Namespace) -> dict:
    import torch

    from mmstepnet.analysis import diffusion

    def function(u):
        # A product of two coordinates in space where there are two angles; cos on the circle.
        return u[0].cos() if len(u) == 1 else u[0].sin() * u[1].cos() * u[0].cos()

    def tilt(u):
        return 0.7 * u[0].cos()

    if run.column == 'quadrature':
        name, uniform, grid = MANIFOLDS[run.row]
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


def _generator_errors(result: dict) -> list[float]:
    """Error of the generator that a step implies, (A h - h) / (eps / 2), at each step size.

    A step's own error goes to 0 with eps however few points there are, this one doesn't.
    """
    curves = result['curves']
    return [2 * error / eps for eps, error in zip(curves['eps'], curves['error'], strict=True)]


def _tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
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
            errors = [_generator_errors(result) for result in chosen]
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


def _figures(results: list[dict], out: Path) -> list[Path]:
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
            columns = zip(*(_generator_errors(result) for result in chosen), strict=True)
            mean = [sum(column) / len(chosen) for column in columns]
            curves[f'{number} random points'] = chosen[0]['curves']['eps'], mean
    if curves:
        linear = r'$\varepsilon / 4$', 1 / 4, 1
        figure = diffusion_figure(curves, linear, 'error of the generator')
        files += save_figure(figure, out / 'diffusion_random')
    return files


EXPERIMENT = Experiment(
    help='one attention step against diffusion on circle, sphere and torus',
    runs=_runs,
    execute=_execute,
    tables=_tables,
    figures=_figures,
    seeds=10,
)
