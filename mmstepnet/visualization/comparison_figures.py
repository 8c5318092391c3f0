"""Figures that put the stiffness reports of several models side by side.

Reports with the same ``model`` are runs of one model, with different seeds as a rule.
"""

import math
from pathlib import Path

import numpy as np

from mmstepnet.stiffness.correlation import rank_correlation

from .figures import COLORS, GREY, MARKERS, new_figure, save_figure, styled
from .labels import literal, metric_label, short_names, shorten
from .stiffness_figures import mark_stages, nsi_label, stage_runs

_MIN_RANKED = 3


def save_comparison_figures(reports, out_dir, metric=None):
    """Write every across-model figure as PNG and PDF.

    Args:
        reports (Sequence[dict]): Reports, each with a ``model``.
        out_dir (str | Path): Folder to write to; it is made if it is missing.
        metric (str, optional): Which of the reports' metrics is the accuracy. Without it there is
            no figure of accuracy against TNS.

    Returns:
        list[Path]: The files: ``tns``, ``nsi_models``, ``accuracy_tns``.
    """
    files = []
    for name, figure in comparison_figures(reports, metric).items():
        files += save_figure(figure, Path(out_dir) / name)
    return files


def comparison_figures(reports, metric=None):
    """Return the figures that :func:`save_comparison_figures` writes, by name."""
    figures = {'tns': tns_figure(reports), 'nsi_models': runs_figure(reports)}
    if metric is not None:
        figures['accuracy_tns'] = accuracy_figure(reports, metric)
    return figures


def group_by_model(reports):
    """Return the reports of each model, in the order of their first appearance.

    Args:
        reports (Sequence[dict]): Reports, each with a ``model``.

    Returns:
        dict[str, list[dict]]: Runs by model.

    Raises:
        ValueError: If there is no report, or one without ``model``.
    """
    if not reports:
        raise ValueError('reports must hold at least one report, got none')
    groups = {}
    for index, report in enumerate(reports):
        if not report['model']:
            raise ValueError(f'reports must each name their model, number {index} does not')
        groups.setdefault(report['model'], []).append(report)
    return groups


@styled
def tns_figure(reports):
    """Bars of TNS, one a model, with error bars.

    Args:
        reports (Sequence[dict]): Reports, each with a ``model``.

    Returns:
        Figure: Where every model has one run, error bars are standard errors over samples. Where
        one has several, bars are means over runs (dots), error bars their standard deviations.
    """
    groups = group_by_model(reports)
    several = len(groups) < len(reports)
    figure = new_figure(0.75 + 0.2 * len(groups) + 0.15 * several)
    axes = figure.subplots()
    for row, runs in enumerate(groups.values()):
        values = [run['tns']['mean'] for run in runs]
        error = np.std(values, ddof=1) if len(runs) > 1 else None
        if not several:
            error = runs[0]['tns']['std_error']
        axes.barh(
            row,
            np.mean(values),
            height=0.7,
            color=COLORS[0],
            alpha=0.75,
            xerr=error,
            error_kw=dict(elinewidth=0.8, capsize=2, capthick=0.8),
        )
        if len(runs) > 1:
            axes.plot(values, [row] * len(runs), 'o', color='black', markersize=2.2, alpha=0.7)
    axes.set_yticks(range(len(groups)), [literal(name) for name in short_names(groups, 24)])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.tick_params(axis='y', length=0)
    axes.set_xlim(left=0)
    axes.grid(axis='x')
    spread = 'mean ± standard deviation over runs' if several else '± standard error over samples'
    axes.set_xlabel(f'Total neural stiffness\n({spread})')
    return figure


@styled
def runs_figure(reports):
    """Mean NSI along the blocks, one panel a model, one thin line a run.

    Args:
        reports (Sequence[dict]): Reports, each with a ``model``.

    Returns:
        Figure: The thick line is the mean over runs that recorded the same number of blocks; all
        panels share the vertical axis.
    """
    groups = group_by_model(reports)
    names = short_names(groups, 23)
    columns = 3 if len(groups) > 6 and max(map(len, names)) <= 15 else min(len(groups), 2)
    rows = math.ceil(len(groups) / columns)
    panel_height = {1: 1.8, 2: 1.3, 3: 1.05}[columns]
    figure = new_figure(0.45 + panel_height * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, name, runs in zip(panels.flat, names, groups.values(), strict=False):
        stages = max((run['stages'] for run in runs), key=len)
        if len(runs) > 1:
            for run in runs:
                _draw_run(axes, run['stages'], run['nsi_mean'], color=GREY, linewidth=0.5)
        alike = [run['nsi_mean'] for run in runs if len(run['stages']) == len(stages)]
        _draw_run(axes, stages, np.mean(alike, axis=0), color=COLORS[0], linewidth=1.2)
        mark_stages(axes, stages, numbers=columns < 3)
        axes.set_title(literal(name), fontsize=7, pad=10 if columns < 3 else 3)
        axes.locator_params(axis='x', integer=True, nbins=5 if columns < 3 else 3)
        axes.grid(axis='y')
    highest = max(max(report['nsi_mean']) for report in reports)
    panels[0, 0].set_ylim(0, 1.05 * highest if highest > 0 else 1)
    for axes in panels.flat[len(groups) :]:
        axes.set_visible(False)
    figure.supxlabel('Recorded block', fontsize=8)
    steps = {report['step'] for report in reports}
    label = nsi_label(steps.pop()) if len(steps) == 1 else 'NSI'
    figure.supylabel(f'Mean {label}', fontsize=8)
    if len(groups) < len(reports):
        lines = [
            panels[0, 0].plot([], [], color=GREY, linewidth=0.5, label='single runs')[0],
            panels[0, 0].plot([], [], color=COLORS[0], linewidth=1.2, label='mean over runs')[0],
        ]
        figure.legend(handles=lines, loc='outside upper center', ncol=2)
    return figure


def _draw_run(axes, stages, values, color, linewidth):
    few = len(stages) <= 12
    for first, last in stage_runs(stages):
        axes.plot(
            range(first + 1, last + 1),
            values[first:last],
            color=color,
            linewidth=linewidth,
            marker='o' if few or last - first == 1 else None,
            markersize=1.5 + linewidth,
        )


@styled
def accuracy_figure(reports, metric):
    """Accuracy against TNS, with Kendall's and Spearman's rank correlation over models.

    Args:
        reports (Sequence[dict]): Reports, each with a ``model``.
        metric (str): Which of the reports' metrics is the accuracy.

    Returns:
        Figure: One filled mark a model (the mean over its runs), one pale mark a run. Runs of one
        model aren't independent, so the correlation is that of the models' means; it needs three.

    Raises:
        ValueError: If a report lacks ``metric`` or has no number there.
    """
    groups = group_by_model(reports)
    for report in reports:
        value = report['metrics'].get(metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(
                f'metric {metric!r} must be a number in every report, got {value!r} for model '
                f'{report["model"]!r}, which has {sorted(report["metrics"])}'
            )
    names = short_names(groups, 46)
    longest = max(map(len, names))
    columns = 3 if longest <= 12 else 2 if longest <= 21 else 1
    figure = new_figure(2.6 + 0.14 * math.ceil(len(groups) / columns))
    axes = figure.subplots()
    means = []
    for index, (name, runs) in enumerate(zip(names, groups.values(), strict=True)):
        points = np.array([(run['tns']['mean'], run['metrics'][metric]) for run in runs])
        means.append(points.mean(axis=0))
        style = dict(
            linestyle='none',
            color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)],
            markeredgewidth=0,
        )
        if len(runs) > 1:
            axes.plot(*points.T, markersize=3, alpha=0.4, **style)
        elif runs[0]['tns']['std_error'] is not None:
            axes.errorbar(
                *points.T,
                xerr=runs[0]['tns']['std_error'],
                fmt='none',
                ecolor=style['color'],
                elinewidth=0.7,
            )
        axes.plot(*means[-1], markersize=5.5, label=literal(name), **style)
    axes.set_title(_describe_ranks(np.array(means)), loc='left', fontsize=7)
    axes.margins(0.08)
    axes.grid()
    axes.set_xlabel('Total neural stiffness')
    axes.set_ylabel(literal(shorten(metric_label(metric), 40)))
    figure.legend(loc='outside lower center', ncol=columns, handletextpad=0.2, columnspacing=1)
    return figure


def _describe_ranks(means):
    count = len(means)
    if count < _MIN_RANKED:
        return f'No rank correlation: {count} of at least {_MIN_RANKED} models'
    ranks = rank_correlation(means[:, 0], means[:, 1], nan_policy='omit')
    parts = [
        f'{name} = {statistic:.2f} (p = {p_value:.2g})'.replace('-', '\N{MINUS SIGN}', 1)
        if math.isfinite(statistic)
        else f'{name} undefined'
        for name, (statistic, p_value) in (
            ('Kendall τ', ranks.kendall),
            ('Spearman ρ', ranks.spearman),
        )
    ]
    return f'{count} models: {parts[0]},\n{parts[1]}'
