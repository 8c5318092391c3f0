import math

import numpy as np
import pytest
import torch

from mmstepnet.models.layers import RelativeAttention2d
from mmstepnet.visualization.attention_figures import (
    attention_maps_figure,
    center_paths_figure,
    depth_figure,
    diffusion_figure,
    head_figure,
    training_curves_figure,
)


def line(axis, index):
    return np.stack(axis.lines[index].get_data())


def test_contours_hold_their_mass_of_the_head():
    layer = RelativeAttention2d(1, 1, num_heads=1, precision='general')
    matrix = torch.tensor([[1.3, 0.4], [-0.2, 0.7]])
    with torch.no_grad():
        layer.centers.copy_(torch.tensor([[1.0, -2.0]]))
        layer.spreads.copy_(matrix)
    axis = head_figure([layer]).axes[0]
    assert line(axis, 0).ravel().tolist() == [-2.0, 1.0]  # x is the column
    # Points of exp(-|M (x - c)|^2) are M^-1 z / sqrt(2) + c with z standard normal.
    points = torch.linalg.solve(matrix, torch.randn(2, 20_000)) / math.sqrt(2)
    for index, mass in ((1, 0.5), (2, 0.9)):
        cols, rows = line(axis, index)
        contour = torch.tensor(np.stack([rows - 1.0, cols + 2.0])).float()
        # M turns the contour into a circle.
        radius = (matrix @ contour).norm(dim=0)
        assert radius.std() < 1e-5
        inside = (matrix @ points).norm(dim=0) < radius.mean()
        assert inside.float().mean().item() == pytest.approx(mass, abs=0.015)


def test_heads_outside_the_frame_are_counted():
    centers = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, -7.0]])
    axis = head_figure([(centers, torch.ones(3))]).axes[0]
    assert [text.get_text() for text in axis.texts] == ['+2']
    with pytest.raises(ValueError, match='quadratic'):
        head_figure([RelativeAttention2d(1, 1, position='learned')])


def test_attention_maps_show_the_query_s_row():
    weights = torch.rand(2, 6, 6)
    figure = attention_maps_figure([weights], query=(1, 2), shape=(2, 3))
    for head in range(2):
        image = figure.axes[head].images[0].get_array()
        assert np.allclose(image, weights[head, 5].reshape(2, 3))
    with pytest.raises(ValueError, match='query'):
        attention_maps_figure([weights], query=(2, 0), shape=(2, 3))
    with pytest.raises(ValueError, match='attention'):
        attention_maps_figure([weights], query=(0, 0), shape=(2, 2))


def test_curves_show_mean_and_spread_over_seeds():
    curves = [
        dict(step=[1, 2], loss=[1.0, 0.5], accuracy=[50.0, 70.0]),
        dict(step=[1, 2], loss=[2.0, 1.5], accuracy=[60.0, 90.0]),
    ]
    axis = training_curves_figure({'a': curves}).axes[1]
    assert line(axis, 0)[1].tolist() == [55, 80]
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(80 + np.std([70, 90], ddof=1))


def test_paths_diffusion_and_depth():
    paths = torch.arange(12.0).view(3, 2, 2) / 4
    axis = center_paths_figure([paths]).axes[0]
    assert line(axis, 0).tolist() == [paths[:, 0, 1].tolist(), paths[:, 0, 0].tolist()]
    axis = diffusion_figure({'a': ([0.1, 0.01], [1e-3, 1e-5])}, ('eps^2', 2.0, 2)).axes[0]
    assert line(axis, 0).tolist() == [[0.1, 0.01], [1e-3, 1e-5]]
    assert np.allclose(line(axis, 1), [[0.01, 0.1], [0.0002, 0.02]])
    axis = depth_figure({'a': torch.tensor([[1.0, 3.0], [2.0, 2.0]])}, 'rank').axes[0]
    assert axis.lines[0].get_ydata().tolist() == [2, 2]


def test_more_networks_than_colours():
    names = [f'net {i}' for i in range(12)]
    curves = [dict(step=[0, 1], accuracy=[1.0, 2.0], loss=[2.0, 1.0])]
    training_curves_figure(dict.fromkeys(names, curves), xlabel='epoch')
    depth_figure({name: torch.rand(3, 2) for name in names}, 'rank')
    diffusion_figure({name: ([0.1, 0.01], [0.1, 0.01]) for name in names}, ('x', 1.0, 1))
