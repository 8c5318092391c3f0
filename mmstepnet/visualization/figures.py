"""What every figure of the package shares: size, colours, and how one becomes a file or an image.

Figures are matplotlib ``Figure`` objects on an Agg canvas, made without pyplot: no display is
needed, no global state is touched, and a figure is freed with its last reference. matplotlib is
imported when the first figure is made.
"""

import functools
from pathlib import Path

COLUMN_WIDTH = 3.3
"""Width in inches of one column of a two-column paper; every figure has it."""

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
"""Okabe and Ito's palette, distinguishable under every common colour vision deficiency."""

MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '<', '>', 'p')
GREY = '#6E6E6E'

_STYLE = {
    'font.family': 'DejaVu Sans',
    'font.size': 8,
    'mathtext.fontset': 'dejavusans',
    'text.usetex': False,
    'axes.titlesize': 8,
    'axes.labelsize': 8,
    'axes.linewidth': 0.6,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.axisbelow': True,
    'xtick.labelsize': 7,
    'ytick.labelsize': 7,
    'xtick.major.width': 0.6,
    'ytick.major.width': 0.6,
    'xtick.major.size': 2.5,
    'ytick.major.size': 2.5,
    'grid.color': '#D9D9D9',
    'grid.linewidth': 0.5,
    'legend.fontsize': 7,
    'legend.frameon': False,
    'legend.handlelength': 1.6,
    'lines.linewidth': 1.2,
    'hatch.linewidth': 0.5,
    'figure.dpi': 150,
    # Type 42 keeps text in a PDF selectable; journals refuse matplotlib's default, type 3.
    'pdf.fonttype': 42,
    'svg.hashsalt': 'mmstepnet',
}


def styled(function):
    """Run a function that makes or saves figures under the package's style."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return function(*args, **kwargs)

    return wrapper


def new_figure(height):
    """Return an empty column-wide figure, ``height`` inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMN_WIDTH, height), layout='constrained')
    FigureCanvasAgg(figure)
    return figure


@styled
def save_figure(figure, path, formats=('png', 'pdf')):
    """Write a figure in several formats.

    Args:
        figure (Figure): What to write.
        path (str | Path): Path without ending; the folder is made if it is missing.
        formats (Sequence[str]): Endings.

    Returns:
        list[Path]: The files.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_name(f'{path.name}.{ending}') for ending in formats]
    # Without a date in it, the same figure is the same file.
    dates = {'pdf': {'CreationDate': None}, 'svg': {'Date': None}}
    for file, ending in zip(files, formats, strict=True):
        figure.savefig(file, format=ending, dpi=300, metadata=dates.get(ending))
    return files


@styled
def figure_to_image(figure, dpi=150):
    """Return a figure as an RGB image, (H, W, 3), uint8, as visualizer backends take it.

    Args:
        figure (Figure): What to draw.
        dpi (int): Pixels an inch.
    """
    import numpy as np

    own_dpi = figure.get_dpi()
    figure.set_dpi(dpi)
    try:
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()
    finally:
        figure.set_dpi(own_dpi)
