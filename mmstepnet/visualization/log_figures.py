"""Curves of trainings: losses, accuracies and whatever else was logged."""

import numpy as np

from .figures import COLORS, MARKERS, new_figure, styled
from .labels import literal, metric_label, short_names

_FEW = 15


@styled
def log_figure(groups, x_label):
    """One panel a quantity, one curve a group of runs.

    Args:
        groups (dict[str, dict[str, tuple[ndarray, ndarray, ndarray]]]): Of each group, by the
            quantity's name: positions along the training, means over runs and standard deviations
            over runs (NaN for a single run), each (P,). A group may lack a quantity.
        x_label (str): What the positions count.

    Returns:
        Figure: Panels share the horizontal axis. A band is mean ± standard deviation.

    Raises:
        ValueError: No group, or none with a quantity.
    """
    keys = list(dict.fromkeys(key for curves in groups.values() for key in curves))
    if not keys:
        raise ValueError('groups must hold at least one curve, got none')
    figure = new_figure(0.35 + 1.3 * len(keys) + 0.14 * len(groups))
    panels = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    names = short_names(groups, 54)
    lines = []
    for index, (name, curves) in enumerate(zip(names, groups.values(), strict=True)):
        color = COLORS[index % len(COLORS)]
        style = ('-', '--', ':')[index // len(COLORS) % 3]
        marker = MARKERS[index % len(MARKERS)]
        look = dict(color=color, marker=marker, markersize=2.5, linewidth=1)
        lines += panels[0].plot([], [], style, label=literal(name), **look)
        for axes, key in zip(panels, keys, strict=True):
            if key not in curves:
                continue
            x, mean, deviation = curves[key]
            look['marker'] = marker if len(x) <= _FEW else None
            axes.plot(x, mean, style, **look)
            band = np.nan_to_num(deviation)
            axes.fill_between(
                x,
                mean - band,
                mean + band,
                where=np.isfinite(deviation),
                color=color,
                alpha=0.2,
                linewidth=0,
            )
    for axes, key in zip(panels, keys, strict=True):
        axes.set_ylabel(literal(metric_label(key)))
        axes.grid()
    figure.align_ylabels(panels)
    panels[-1].set_xlabel(x_label)
    panels[-1].set_xlim(left=0)
    figure.legend(handles=lines, loc='outside lower center', ncol=1)
    return figure
