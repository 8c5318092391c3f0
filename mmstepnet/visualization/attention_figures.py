"""Figures of attention: training curves, heads over the pixel grid, and diffusion.

As in the stiffness figures, everything is made without pyplot and returned as a ``Figure``.
"""

import math

import numpy as np
import torch

from .figures import COLORS, COLUMN_WIDTH, GREY, MARKERS, new_figure, styled
from .labels import literal

# -log(1 - p) is the squared radius that holds the mass p of exp(-r^2).
_MASSES = (0.5, 0.9)


@styled
def training_curves_figure(groups, xlabel='step'):
    """Loss and test accuracy over training: mean and one standard deviation over seeds.

    Args:
        groups (dict[str, list[dict]]): Curves of each method's seeds: ``step``, ``loss`` and
            ``accuracy`` (in %), equally long.
        xlabel (str): What is counted.

    Returns:
        Figure: Loss above, accuracy below.
    """
    figure = new_figure(3.4)
    axes = figure.subplots(2, 1, sharex=True)
    labels = {'loss': 'training loss', 'accuracy': 'test accuracy (%)'}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for i, (method, curves) in enumerate(groups.items()):
            steps = curves[0]['step']
            values = np.array([curve[name] for curve in curves])
            mean = values.mean(0)
            spread = values.std(0, ddof=1) if len(curves) > 1 else np.zeros_like(mean)
            axis.plot(steps, mean, color=COLORS[i % len(COLORS)], label=literal(method))
            axis.fill_between(
                steps,
                mean - spread,
                mean + spread,
                color=COLORS[i % len(COLORS)],
                alpha=0.2,
                linewidth=0,
            )
        axis.set_ylabel(label)
        axis.grid(True)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside upper center', ncols=2)
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(top=101)
    axes[1].set_xlabel(xlabel)
    return figure


def _ellipse(center, matrix, mass):
    """Points (2, 100) of the contour that holds ``mass`` of exp(-|M (x - center)|^2)."""
    angle = np.linspace(0, 2 * math.pi, 100)
    circle = math.sqrt(-math.log(1 - mass)) * np.stack([np.cos(angle), np.sin(angle)])
    return center[:, None] + np.linalg.solve(matrix, circle)


@styled
def head_figure(layers, reach=6.0, titles=None):
    r"""Where each head of quadratic relative attention looks, layer by layer.

    A dot marks the centre :math:`\Delta_h`, a solid contour holds half of the head's mass, a
    dashed one 90 %, both on the unbounded plane. The grey square is the query pixel. Heads whose
    centre lies outside the picture's frame are counted in its corner.

    Args:
        layers (Sequence[RelativeAttention2d | tuple[Tensor, Tensor]]): Layers with
            ``position='quadratic'``, or their ``centers`` (heads, 2) and ``spreads`` (heads,) or
            (heads, 2, 2).
        reach (float): Pixels shown in each direction.
        titles (Sequence[str], optional): One a layer; ``layer 1`` and so on by default.

    Returns:
        Figure: One panel a layer.

    Raises:
        ValueError: A layer has no centres.
    """
    parts = [_centers_and_spreads(layer) for layer in layers]
    titles = titles or [f'layer {i + 1}' for i in range(len(parts))]
    figure, axes = _layer_panels(len(parts), reach)
    for axis, (centers, spreads), title in zip(axes, parts, titles, strict=True):
        outside = 0
        for h, (center, spread) in enumerate(zip(centers, spreads, strict=True)):
            color = COLORS[h % len(COLORS)]
            if np.abs(center).max() > reach:
                outside += 1
                continue
            axis.plot(center[1], center[0], '.', color=color, markersize=4)
            matrix = spread if spread.ndim else spread * np.eye(2)
            if abs(np.linalg.det(matrix)) < 1e-8:
                continue
            for mass, style in zip(_MASSES, ('-', '--'), strict=True):
                rows_, cols_ = _ellipse(center, matrix, mass)
                axis.plot(cols_, rows_, style, color=color, linewidth=0.7)
        if outside:
            axis.text(
                0.97, 0.03, f'+{outside}', transform=axis.transAxes, ha='right', va='bottom',
                color=GREY, fontsize=7,
            )  # fmt: skip
        axis.set_title(literal(title))
    return figure


def _layer_panels(count, reach):
    """A figure with one square panel a layer, offsets from the query on its axes."""
    from matplotlib.patches import Rectangle

    columns = min(3, count)
    rows = -(-count // columns)
    figure = new_figure(rows * (COLUMN_WIDTH / columns + 0.15) + 0.25)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes[:count]:
        pixel = Rectangle((-0.5, -0.5), 1, 1, facecolor='#D0D0D0', edgecolor='none')
        axis.add_patch(pixel)
        axis.set_xlim(-reach, reach)
        axis.set_ylim(reach, -reach)
        axis.set_aspect('equal')
        axis.grid(True)
    figure.supxlabel('column of the key - of the query (pixels)', fontsize=8)
    figure.supylabel('row (pixels)', fontsize=8)
    return figure, axes[:count]


def _centers_and_spreads(layer):
    if not isinstance(layer, tuple):
        if getattr(layer, 'centers', None) is None:
            raise ValueError("head_figure needs layers with position='quadratic'")
        layer = (layer.centers, layer.spreads)
    return tuple(part.detach().cpu().double().numpy() for part in layer)


@styled
def attention_maps_figure(attention, query, shape, picture=None):
    """The weights that one query pixel gives to every pixel, head by head and layer by layer.

    Args:
        attention (Sequence[Tensor]): Weights of each layer for one sample, (heads, queries, keys),
            pixels in row-major order.
        query (tuple[int, int]): Row and column of the query.
        shape (tuple[int, int]): Height and width of the grid of pixels.
        picture (Tensor, optional): (height, width) or (height, width, 3), shown first; of any size.

    Returns:
        Figure: One row a layer, one column a head; the query outlined.

    Raises:
        ValueError: ``query`` lies outside ``shape``, or the weights are of another size.
    """
    height, width = shape
    if not (0 <= query[0] < height and 0 <= query[1] < width):
        raise ValueError(f'query={query} lies outside the grid of {height}x{width} pixels')
    wanted = (height * width, height * width)
    if any(tuple(layer.shape[-2:]) != wanted for layer in attention):
        sizes = [tuple(layer.shape) for layer in attention]
        raise ValueError(f'attention must be (heads, {wanted[0]}, {wanted[0]}), got {sizes}')
    heads = max(len(layer) for layer in attention)
    columns = heads + (picture is not None)
    side = COLUMN_WIDTH / columns
    figure = new_figure(len(attention) * (side + 0.03) + 0.3)
    axes = figure.subplots(len(attention), columns, squeeze=False)
    index = query[0] * width + query[1]
    for i, layer in enumerate(attention):
        weights = layer[:, index].detach().cpu().float().reshape(-1, height, width).numpy()
        row = axes[i]
        if picture is not None:
            row[0].imshow(picture, cmap='gray', extent=(-0.5, width - 0.5, height - 0.5, -0.5))
            row = row[1:]
        for h, axis in enumerate(row):
            if h < len(weights):
                axis.imshow(weights[h], cmap='viridis', vmin=0)
        for axis in axes[i]:
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if axis.images:
                axis.add_patch(_outline(query))
        axes[i][0].set_ylabel(str(i + 1), rotation=0, ha='right', va='center')
    for h, axis in enumerate(axes[0][columns - heads :]):
        axis.set_title(str(h + 1))
    figure.supylabel('layer', fontsize=8)
    figure.suptitle('head', fontsize=8)
    return figure


def _outline(query):
    from matplotlib.patches import Rectangle

    return Rectangle(
        (query[1] - 0.5, query[0] - 0.5), 1, 1, fill=False, edgecolor=COLORS[1], linewidth=0.8
    )


@styled
def diffusion_figure(errors, reference=None, ylabel='largest error of the step'):
    r"""Error of one attention step against the diffusion that it approximates, over eps.

    Args:
        errors (dict[str, tuple[Sequence[float], Sequence[float]]]): Step sizes and the error at
            each, by name (a number of points, a manifold).
        reference (tuple[str, float, int], optional): Label, constant c and order k of a line
            c * eps^k.
        ylabel (str): What is shown.

    Returns:
        Figure: Logarithmic axes.
    """
    figure = new_figure(2.8)
    axis = figure.subplots()
    for i, (name, (eps, values)) in enumerate(errors.items()):
        axis.plot(
            eps,
            values,
            color=COLORS[i % 6],
            marker=MARKERS[i % len(MARKERS)],
            markersize=3,
            label=literal(name),
        )
    if reference is not None:
        label, constant, order = reference
        every = np.concatenate([steps for steps, _ in errors.values()])
        ends = np.array([every.min(), every.max()])
        axis.plot(ends, constant * ends**order, '--', color=GREY, linewidth=0.8, label=label)
    axis.set_xscale('log')
    axis.set_yscale('log')
    axis.set_xlabel(r'step size $\varepsilon$')
    axis.set_ylabel(ylabel)
    axis.grid(True)
    axis.legend()
    return figure


@styled
def depth_figure(series, ylabel, xlabel='layer'):
    """A number along the depth of several networks: mean and standard deviation over samples.

    Args:
        series (dict[str, Tensor]): (layers, samples) or (layers,) by name.
        ylabel (str): What is shown.
        xlabel (str): What is counted, from 0.

    Returns:
        Figure: One line a network.
    """
    figure = new_figure(2.2)
    axis = figure.subplots()
    for i, (name, values) in enumerate(series.items()):
        values = torch.as_tensor(values).double()
        values = values[:, None] if values.ndim == 1 else values
        mean = values.mean(1).numpy()
        spread = values.std(1).numpy() if values.shape[1] > 1 else np.zeros_like(mean)
        axis.errorbar(
            range(len(mean)), mean, spread, color=COLORS[i % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)], markersize=3, capsize=2, label=literal(name),
        )  # fmt: skip
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(True)
    axis.legend()
    return figure


@styled
def center_paths_figure(paths, reach=6.0, titles=None):
    """How the centres of quadratic relative attention moved in training, layer by layer.

    Args:
        paths (Sequence[Tensor]): Centres of each layer over time, (times, heads, 2).
        reach (float): Pixels shown in each direction.
        titles (Sequence[str], optional): One a layer; ``layer 1`` and so on by default.

    Returns:
        Figure: One panel a layer; a ring where a centre began, a dot where it ended.
    """
    titles = titles or [f'layer {i + 1}' for i in range(len(paths))]
    figure, axes = _layer_panels(len(paths), reach)
    for axis, path, title in zip(axes, paths, titles, strict=True):
        for h, (rows, cols) in enumerate(path.detach().cpu().double().permute(1, 2, 0).numpy()):
            color = COLORS[h % len(COLORS)]
            axis.plot(cols, rows, color=color, linewidth=0.8)
            axis.plot(cols[0], rows[0], 'o', color=color, markersize=3.5, markerfacecolor='white')
            axis.plot(cols[-1], rows[-1], 'o', color=color, markersize=3)
        axis.set_title(literal(title))
    return figure
