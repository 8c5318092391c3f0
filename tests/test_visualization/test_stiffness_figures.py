import subprocess
import sys

import numpy as np
import pytest

from mmstepnet.stiffness.report import build_report
from mmstepnet.visualization import (
    delta_figure,
    figure_to_image,
    nsi_figure,
    nsi_step_size_figure,
    proportion_figure,
    save_stiffness_figures,
    step_size_figure,
    stiffness_figures,
)


def test_heat_maps_show_the_surfaces_of_the_report(make_report):
    report, _, _ = make_report(samples=30)
    for make, key in ((delta_figure, 'delta'), (proportion_figure, 'p_hat')):
        axes = make(report).axes[0]
        shown = axes.collections[0].get_array()
        # M1 goes along the horizontal axis, which are the columns of a mesh.
        np.testing.assert_array_equal(shown, np.array(report['surfaces'][key]).T)
        assert axes.get_xlim() == (0, report['surfaces']['m1'][-1])
        assert axes.get_ylim() == (0, report['surfaces']['m2'][-1])


def test_curves_are_medians_and_break_between_stages(make_report):
    report, nsi, dt = make_report(depths=(2, 3, 1), samples=9)
    for figure, values in ((nsi_figure(report, nsi), nsi), (step_size_figure(report, dt), dt)):
        thick = [line for line in figure.axes[0].lines if line.get_linewidth() > 1]
        curves = [line.get_xydata() for line in thick]
        assert [curve[:, 0].tolist() for curve in curves] == [[1, 2], [3, 4, 5], [6]]
        expected = values.median(dim=0).values
        np.testing.assert_allclose(np.concatenate(curves)[:, 1], expected)


def test_curves_without_samples_are_means(make_report):
    report, _, _ = make_report(depths=(4,))
    (line,) = nsi_figure(report).axes[0].lines
    np.testing.assert_allclose(line.get_ydata(), report['nsi_mean'])


def test_correlations_are_shown_for_extreme_blocks(make_report):
    report, nsi, dt = make_report(depths=(3,), samples=50)
    dt[:, 0] = 1 - nsi[:, 0] / 2
    dt[:, 2] = nsi[:, 2] / 2
    lowest, middle, highest, histogram = nsi_step_size_figure(report, nsi, dt).axes
    assert lowest.get_title() == 'layer1.0\nr = −1.00'
    assert highest.get_title() == 'layer1.2\nr = 1.00'
    r = np.corrcoef(nsi[:, 1], dt[:, 1])[0, 1]
    assert middle.get_title() == f'layer1.1\nr = {r:.2f}'.replace('-', '−')
    np.testing.assert_array_equal(lowest.lines[0].get_xdata(), dt[:, 0])
    assert sum(bar.get_height() for bar in histogram.patches) == 3


def test_constant_step_size_is_said_to_have_no_correlation(make_report):
    report, nsi, dt = make_report(depths=(3,))
    dt[:, 1] = 0.5
    figure = nsi_step_size_figure(report, nsi, dt, blocks=['layer1.1'])
    assert figure.axes[0].get_title() == 'layer1.1\nr undefined'
    assert 'undefined in 1 of 3' in figure.axes[1].get_xlabel()
    dt[:] = 0.5
    assert 'undefined in 3 of 3' in nsi_step_size_figure(report, nsi, dt).axes[-1].get_xlabel()


def test_unknown_block_is_named(make_report):
    report, nsi, dt = make_report()
    with pytest.raises(ValueError, match=r"one to three names of .*got \['layer9'\]"):
        nsi_step_size_figure(report, nsi, dt, blocks=['layer9'])


def test_step_size_figure_needs_step_sizes(make_report):
    report, nsi, _ = make_report(with_dt=False)
    with pytest.raises(ValueError, match='must have step sizes'):
        step_size_figure(report)
    assert list(stiffness_figures(report, nsi)) == ['delta', 'p_hat', 'nsi']


@pytest.mark.parametrize(
    ('step_size', 'extra'), [(1.0, []), (0.5, ['step_size']), (None, ['step_size'])]
)
def test_what_says_nothing_is_not_drawn(make_report, step_size, extra):
    _, nsi, dt = make_report(samples=1 if step_size is None else 6)
    if step_size is not None:
        dt.fill_(step_size)
    names = ['layer1.0', 'layer1.1', 'layer2.0', 'layer2.1', 'layer2.2']
    report = build_report(nsi, [1, 1, 2, 2, 2], names, 'attention', dt, model='net')
    assert list(stiffness_figures(report, nsi, dt)) == ['delta', 'p_hat', 'nsi', *extra]


@pytest.mark.parametrize(
    'options',
    [
        dict(samples=1, depths=(1,)),
        dict(samples=2, depths=(1, 1)),
        dict(samples=2, depths=(1,) * 7),
        dict(model=None),
        dict(model='$x_{ $ a\\b', m1=[0.0], m2=[0.5]),
    ],
)
def test_odd_reports_can_be_drawn(make_report, options):
    for figure in stiffness_figures(*make_report(**options)).values():
        figure_to_image(figure, dpi=30)


def test_title_holds_the_name_as_it_is(make_report):
    report, _, _ = make_report(model='a$b$c', samples=1)
    title = delta_figure(report).get_suptitle()
    assert title.startswith(r'a\$b\$c: TNS = ')


def test_files(make_report, tmp_path):
    files = save_stiffness_figures(*make_report(), tmp_path / 'figures')
    names = ['delta', 'p_hat', 'nsi', 'step_size', 'nsi_step_size']
    assert [file.name for file in files] == [f'{n}.{e}' for n in names for e in ('png', 'pdf')]
    for file in files:
        start = file.read_bytes()[:5]
        assert start == (b'%PDF-' if file.suffix == '.pdf' else b'\x89PNG\r')


def test_image_for_visualizer_backends(make_report):
    image = figure_to_image(nsi_figure(make_report()[0]), dpi=100)
    assert image.dtype == np.uint8
    assert image.shape == (240, 330, 3)
    assert image[0, 0].tolist() == [255, 255, 255]
    assert (image == [0x00, 0x72, 0xB2]).all(axis=-1).any()


def test_drawing_is_headless_and_leaves_no_global_state(make_report):
    program = (
        'import sys, mmstepnet.visualization as v; assert "matplotlib" not in sys.modules; '
        'import matplotlib; before = matplotlib.rcParams.copy(); '
        'from mmstepnet.stiffness import build_report; '
        'v.figure_to_image(v.delta_figure(build_report([[1.0, 2.0]], [0, 0], "ab", "unit"))); '
        'assert matplotlib.rcParams.copy() == before; '
        'assert "matplotlib.pyplot" not in sys.modules'
    )
    subprocess.run([sys.executable, '-c', program], check=True)


def test_samples_may_carry_a_graph(make_report):
    report, nsi, dt = make_report(depths=(1,))
    axes = nsi_step_size_figure(report, nsi.requires_grad_(), dt).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), nsi.detach()[:, 0])
