import numpy as np
import pytest

from mmstepnet.visualization import figure_to_image
from mmstepnet.visualization.log_figures import log_figure

NAN = float('nan')


def curve(x, mean, deviation=None):
    deviation = [NAN] * len(x) if deviation is None else deviation
    return tuple(np.array(values, float) for values in (x, mean, deviation))


def lines_with_data(axes):
    return [line for line in axes.lines if len(line.get_xdata())]


def test_curves_bands_and_labels():
    groups = {
        'a$b': {
            'loss': curve([1, 2, 3], [3, 2, 1], [0.5, 0.25, NAN]),
            'accuracy/top1': curve([2], [50]),
        },
        'c': {'loss': curve([1, 2], [4, 3])},
    }
    figure = log_figure(groups, 'Epoch')
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ('loss', 'accuracy/top1 (%)')
    assert accuracy.get_xlabel() == 'Epoch' and accuracy.get_xlim() == loss.get_xlim()
    first, second = lines_with_data(loss)
    assert first.get_xydata().tolist() == [[1, 3], [2, 2], [3, 1]]
    assert second.get_xydata().tolist() == [[1, 4], [2, 3]]
    assert first.get_color() != second.get_color()
    (point,) = lines_with_data(accuracy)
    assert point.get_xydata().tolist() == [[2, 50]] and point.get_color() == first.get_color()

    # The band is there where the deviation is known.
    (outline,) = (band.get_paths()[0].vertices for band in loss.collections if band.get_paths())
    assert {tuple(vertex) for vertex in outline.tolist()} == {
        *((1, 2.5), (1, 3.5), (2, 1.75), (2, 2.25)),
    }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [r'a\$b', 'c']
    assert figure_to_image(figure).std() > 0


def test_more_groups_than_colours_still_differ():
    groups = {f'g{i}': {'loss': curve([1, 2], [i, i])} for i in range(16)}
    (axes,) = log_figure(groups, 'Epoch').axes
    looks = {(line.get_color(), line.get_linestyle()) for line in lines_with_data(axes)}
    assert len(looks) == 16


def test_nothing_to_draw():
    for groups in ({}, {'a': {}}):
        with pytest.raises(ValueError, match='at least one curve'):
            log_figure(groups, 'Epoch')
