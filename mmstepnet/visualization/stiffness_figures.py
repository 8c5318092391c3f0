"""Figures of one stiffness report, after those of StepNet (https://arxiv.org/abs/2308.09939)."""

import itertools
from pathlib import Path

import numpy as np
import torch

from mmstepnet.stiffness.correlation import step_size_correlation

from .figures import COLORS, GREY, new_figure, save_figure, styled
from .labels import literal, shorten, with_error

_MAX_POINTS = 2000
_MIN_SMOOTH = 20
_STEP_FORMULA = {
    'attention': r'$\Vert f\Vert\,/\,\Vert x\Vert$',
    'unit': r'$\Vert f\cdot dt\Vert\,/\,\Vert x\Vert$',
}


def save_stiffness_figures(report, nsi, dt, out_dir):
    """Write every figure of one report as PNG and PDF.

    Args:
        report (dict): A report of :func:`mmstepnet.stiffness.report.build_report`.
        nsi (Tensor | None): NSI of every sample and block, (N, L). Without it the figure along the
            blocks shows means only.
        dt (Tensor | None): Mean step size of every sample and block, (N, L).
        out_dir (str | Path): Folder to write to; it is made if it is missing.

    Returns:
        list[Path]: The files: ``delta``, ``p_hat`` and ``nsi``; ``step_size`` if there are step
        sizes other than 1; ``nsi_step_size`` if those of some block differ between samples.
    """
    files = []
    for name, figure in stiffness_figures(report, nsi, dt).items():
        files += save_figure(figure, Path(out_dir) / name)
    return files


def stiffness_figures(report, nsi=None, dt=None):
    """Return the figures that :func:`save_stiffness_figures` writes, by name.

    Args:
        report (dict): A report.
        nsi (Tensor, optional): (N, L).
        dt (Tensor, optional): (N, L).

    Returns:
        dict[str, Figure]: In the order in which one looks at them.
    """
    figures = {
        'delta': delta_figure(report),
        'p_hat': proportion_figure(report),
        'nsi': nsi_figure(report, nsi),
    }
    if report['dt_mean'] is not None and any(mean != 1 for mean in report['dt_mean']):
        figures['step_size'] = step_size_figure(report, dt)
    if nsi is not None and dt is not None and (_as_array(dt) != _as_array(dt[:1])).any():
        figures['nsi_step_size'] = nsi_step_size_figure(report, nsi, dt)
    return figures


@styled
def delta_figure(report):
    """Heat map of the stiffness degree delta over the two thresholds.

    Args:
        report (dict): A report.

    Returns:
        Figure: TNS, the volume under the surface, stands in the title.
    """
    return _surface_figure(
        report,
        report['surfaces']['delta'],
        r'Share of stiff samples, $\delta$',
        levels=(0.1, 0.5, 0.9),
        limits=(0, 1),
    )


@styled
def proportion_figure(report):
    """Heat map of the proportion p-hat of stiff blocks over the two thresholds.

    Args:
        report (dict): A report.

    Returns:
        Figure: With contour lines at round values.
    """
    values = report['surfaces']['p_hat']
    highest = max(map(max, values))
    levels = [level for level in (0.01, 0.05, 0.2, 0.5) if level < highest]
    return _surface_figure(
        report,
        values,
        r'Share of stiff blocks, $\hat{p}$',
        levels=levels,
        limits=(0, highest or 1),
    )


def _surface_figure(report, values, label, levels, limits):
    surfaces = report['surfaces']
    m1, m2 = np.array(surfaces['m1']), np.array(surfaces['m2'])
    values = np.array(values).T
    figure = new_figure(2.6)
    axes = figure.subplots()
    mesh = axes.pcolormesh(
        _edges(m1),
        _edges(m2),
        values,
        cmap='cividis',
        vmin=limits[0],
        vmax=limits[1],
        # A mesh of vector cells shows hairlines between them in many viewers.
        rasterized=True,
    )
    # With a handful of samples the surface is a flight of stairs: lines would hide it.
    if report['num_samples'] >= _MIN_SMOOTH and report['tns']['mean'] > 0 < min(values.shape) - 1:
        colors = ['black' if level > 0.7 * limits[1] else 'white' for level in levels]
        lines = axes.contour(m1, m2, values, levels=levels, colors=colors, linewidths=0.7)
        axes.clabel(lines, fmt=lambda level: f'{level:g}', fontsize=6, inline_spacing=2)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02)
    bar.set_label(label)
    bar.outline.set_linewidth(0.6)
    axes.spines[['top', 'right']].set_visible(True)
    axes.set_xlabel('Relative threshold $M_1$')
    axes.set_ylabel('Absolute threshold $M_2$')
    _add_title(figure, report)
    return figure


@styled
def nsi_figure(report, nsi=None):
    """NSI along the blocks: median and quartiles over samples, and some single samples.

    Args:
        report (dict): A report.
        nsi (Tensor, optional): NSI of every sample and block, (N, L). Without it: the mean.

    Returns:
        Figure: One curve a stage, since the state changes its size between stages.
    """
    figure = new_figure(2.4)
    axes = figure.subplots()
    _draw_along_blocks(axes, report, nsi, report['nsi_mean'], COLORS[0])
    axes.set_ylabel(nsi_label(report['step']))
    return figure


@styled
def step_size_figure(report, dt=None):
    """Step size along the blocks: median and quartiles over samples, and some single samples.

    Args:
        report (dict): A report with step sizes.
        dt (Tensor, optional): Mean step size of every sample and block, (N, L). Without it: the
            mean.

    Returns:
        Figure: One curve a stage.

    Raises:
        ValueError: If the report has no step sizes.
    """
    if report['dt_mean'] is None:
        raise ValueError('report must have step sizes, got one of a network without them')
    figure = new_figure(2.4)
    axes = figure.subplots()
    _draw_along_blocks(axes, report, dt, report['dt_mean'], COLORS[1])
    axes.set_ylabel('Mean step size $dt$')
    return figure


def _draw_along_blocks(axes, report, samples, means, color):
    from matplotlib.ticker import MaxNLocator

    stages = report['stages']
    position = np.arange(1, len(stages) + 1)
    samples = None if samples is None else _as_array(samples)
    show_markers = len(stages) <= 24
    if samples is None or len(samples) == 1:
        center, center_label = np.array(means), 'mean' if samples is None else 'the one sample'
        band, shown = None, np.empty((0, len(stages)))
    else:
        band = np.quantile(samples, (0.25, 0.5, 0.75), axis=0)
        center, center_label = band[1], 'median'
        shown = samples[np.linspace(0, len(samples) - 1, min(len(samples), 5)).astype(int)]

    for index, (first, last) in enumerate(stage_runs(stages)):
        part = slice(first, last)
        label = index == 0
        for row, sample in enumerate(shown):
            axes.plot(
                position[part],
                sample[part],
                color=GREY,
                linewidth=0.5,
                alpha=0.7,
                marker='.' if last - first == 1 else None,
                markersize=2,
                label='single samples' if label and row == 0 else None,
            )
        if band is not None:
            low, high = band[0][part], band[2][part]
            name = 'quartiles' if label else None
            if last - first == 1:
                axes.vlines(
                    position[part], low, high, color=color, alpha=0.35, linewidth=4, label=name
                )
            else:
                axes.fill_between(
                    position[part], low, high, color=color, alpha=0.25, linewidth=0, label=name
                )
        axes.plot(
            position[part],
            center[part],
            color=color,
            marker='o' if show_markers or last - first == 1 else None,
            markersize=3,
            label=center_label if label else None,
        )
    mark_stages(axes, stages)
    axes.set_xlabel('Recorded block')
    if len(stages) <= 12:
        axes.set_xticks(position)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Outliers among the single samples may leave the picture, the quartiles may not.
    axes.set_ylim(bottom=0)
    axes.grid(axis='y')
    _add_title(axes.figure, report)
    axes.figure.legend(loc='outside lower center', ncol=3)


@styled
def nsi_step_size_figure(report, nsi, dt, blocks=None):
    """NSI against step size within single blocks, and the correlations of all blocks.

    Args:
        report (dict): A report with step sizes.
        nsi (Tensor): NSI of every sample and block, (N, L), N >= 2.
        dt (Tensor): Mean step size of every sample and block, (N, L).
        blocks (Sequence[str], optional): Names of up to three blocks to show. By default those of
            the lowest, the median and the highest correlation.

    Returns:
        Figure: Points are samples (2,000 at most are drawn, all count), r is Pearson's.

    Raises:
        ValueError: If ``blocks`` names one that the report doesn't have, or more than three.
    """
    names = report['names']
    correlation = step_size_correlation(nsi, dt, nan_policy='omit').pearson.statistic.numpy()
    nsi, dt = _as_array(nsi), _as_array(dt)
    known = np.flatnonzero(np.isfinite(correlation))
    if blocks is None:
        order = known[np.argsort(correlation[known], kind='stable')]
        chosen = list(dict.fromkeys(order[[0, len(order) // 2, -1]])) if len(order) else [0]
    else:
        chosen = _block_indices(blocks, names)

    figure = new_figure(3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    drawn = np.linspace(0, len(nsi) - 1, min(len(nsi), _MAX_POINTS)).astype(int)
    many = len(drawn) > 100
    columns = top.subplots(1, len(chosen), squeeze=False)[0]
    for axes, block, color in zip(columns, chosen, COLORS, strict=False):
        axes.plot(
            dt[drawn, block],
            nsi[drawn, block],
            '.',
            color=color,
            markersize=3 if many else 6,
            markeredgewidth=0,
            alpha=0.5 if many else 0.8,
            rasterized=many,
        )
        value = f'{correlation[block]:.2f}'.replace('-', '\N{MINUS SIGN}')
        value = f'r = {value}' if block in known else 'r undefined'
        axes.set_title(f'{literal(shorten(names[block], 16))}\n{value}', fontsize=7)
        axes.locator_params(nbins=3)
        axes.tick_params(labelsize=6)
    top.supxlabel('Step size $dt$', fontsize=8)
    top.supylabel('NSI', fontsize=8)

    axes = bottom.subplots()
    axes.hist(correlation[known], bins=np.linspace(-1, 1, 21), color='#BBBBBB', edgecolor='white')
    for block, color in zip(chosen, COLORS, strict=False):
        if block in known:
            axes.axvline(correlation[block], color=color, linewidth=1.2)
    axes.axvline(0, color='black', linewidth=0.6)
    axes.set_xlim(-1, 1)
    axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
    axes.set_ylabel('Blocks')
    undefined = len(names) - len(known)
    axes.set_xlabel(
        "Pearson's r of NSI and step size within a block"
        + (f'\n(undefined in {undefined} of {len(names)}: constant)' if undefined else '')
    )
    return figure


def _block_indices(blocks, names):
    unknown = [block for block in blocks if block not in names]
    if unknown or not 1 <= len(blocks) <= 3:
        raise ValueError(f'blocks must be one to three names of {names}, got {list(blocks)}')
    return [names.index(block) for block in blocks]


def nsi_label(step):
    """Return the axis label of NSI as it is measured with ``step``."""
    return f'NSI, {_STEP_FORMULA[step]}'


def mark_stages(axes, stages, numbers=True):
    """Shade every second stage; with ``numbers`` write each one's label above."""
    runs = stage_runs(stages)
    transform = axes.get_xaxis_transform()
    for index, (first, last) in enumerate(runs):
        if index % 2:
            axes.axvspan(first + 0.5, last + 0.5, color='#F0F0F0', linewidth=0, zorder=0)
        if not numbers:
            continue
        axes.text(
            (first + last + 1) / 2,
            1.01,
            f'stage {stages[first]}' if len(runs) <= 5 else str(stages[first]),
            transform=transform,
            ha='center',
            va='bottom',
            fontsize=6,
            color=GREY,
        )
    axes.set_xlim(0.5, len(stages) + 0.5)


def stage_runs(stages):
    """Return (first, last + 1), counted from 0, of every run of blocks with the same stage."""
    cuts = [0, *(i for i in range(1, len(stages)) if stages[i] != stages[i - 1]), len(stages)]
    return list(itertools.pairwise(cuts))


def _add_title(figure, report):
    tns, model = report['tns'], report['model']
    title = f'TNS = {with_error(tns["mean"], tns["std_error"])}'
    if model is not None:
        title = f'{literal(shorten(model, 24))}: {title}'
    figure.suptitle(title, x=0.02, ha='left', fontsize=8)


def _edges(centers):
    if len(centers) == 1:
        return np.array([centers[0] - 0.5, centers[0] + 0.5])
    middle = (centers[1:] + centers[:-1]) / 2
    return np.concatenate(([centers[0]], middle, [centers[-1]]))


def _as_array(values):
    return torch.as_tensor(values).detach().to('cpu', torch.float64).numpy()
