import itertools
import math

import pytest
import torch

from mmstepnet.analysis.attention_geometry import (
    attention_geometry,
    implied_squared_distances,
    token_clustering,
    trace_layers,
)
from mmstepnet.models.backbones import InformationPropagationNet
from mmstepnet.models.layers import MetricAttention


@pytest.mark.parametrize('kernel', ['metric', 'l2'])
def test_distances_come_back_and_are_a_metric(kernel):
    layer = MetricAttention(8, num_heads=2, kernel=kernel)
    x = torch.randn(2, 9, 8)
    features = layer.features(x)
    expected = torch.cdist(features, features).square()
    squared = implied_squared_distances(layer.scores(x))
    torch.testing.assert_close(squared, expected, rtol=1e-3, atol=1e-4)
    geometry = attention_geometry(layer.scores(x))
    assert geometry.asymmetry.shape == (2, 2)
    assert geometry.asymmetry.max() < 1e-6
    assert geometry.negative.max() == 0
    assert geometry.triangle.max() == 0


def test_weights_and_scores_imply_the_same_distances():
    scores = torch.randn(3, 5, 5)
    from_weights = implied_squared_distances(scores.softmax(-1).log())
    torch.testing.assert_close(from_weights, implied_squared_distances(scores))


def test_a_dot_product_against_loops():
    scores = MetricAttention(8, num_heads=1, kernel='dot').scores(3 * torch.randn(1, 6, 8))[0, 0]
    scores = scores.detach().double()
    squared = [[float(scores[i, i] - scores[i, j]) for j in range(6)] for i in range(6)]
    pairs = list(itertools.permutations(range(6), 2))
    difference = math.fsum((squared[i][j] - squared[j][i]) ** 2 for i, j in pairs)
    total = math.fsum((squared[i][j] + squared[j][i]) ** 2 for i, j in pairs)
    root = [[math.sqrt(max(value, 0)) for value in row] for row in squared]
    triples = list(itertools.permutations(range(6), 3))
    violated = sum(root[i][k] > root[i][j] + root[j][k] + 1e-9 for i, j, k in triples)

    geometry = attention_geometry(scores)
    assert geometry.asymmetry.item() == pytest.approx(math.sqrt(difference / total))
    negative = sum(squared[i][j] < 0 for i, j in pairs)
    assert geometry.negative.item() == pytest.approx(negative / len(pairs)) and negative > 0
    assert geometry.triangle.item() == pytest.approx(violated / len(triples)) and violated > 0


def test_propagation_of_known_weights():
    # Two pairs that talk to each other only: eigenvalues 1, 1, 0, 0 and two neighbours each.
    weights = torch.block_diag(torch.full((2, 2), 0.5), torch.full((2, 2), 0.5))
    geometry = attention_geometry((weights + 1e-12).log())
    assert geometry.neighbours.item() == pytest.approx(2, rel=1e-6)
    assert geometry.spread.item() == pytest.approx(1, rel=1e-6)
    geometry = attention_geometry(torch.zeros(4, 4))
    assert geometry.neighbours.item() == pytest.approx(4)
    assert geometry.spread.item() == pytest.approx(0, abs=1e-7)


def test_clusters_by_hand():
    # Two groups of two tokens at (3, 4) and (-4, 3), apart by 90 degrees, norm 5.
    tokens = torch.tensor([[3.0, 4.0], [3.0, 4.0], [-4.0, 3.0], [-4.0, 3.0]])
    equal = torch.tensor([[1.0, 2.0]]).expand(4, 2)
    found = token_clustering([tokens[None], equal[None]])
    # Of six pairs two agree and four are orthogonal.
    torch.testing.assert_close(found.similarity[:, 0].tolist(), [1 / 3, 1.0])
    # The mean is (-0.5, 3.5) with norm^2 12.5 of 25.
    torch.testing.assert_close(found.spread[:, 0].tolist(), [0.5, 0.0])
    torch.testing.assert_close(found.rank[:, 0].tolist(), [1.0, 0.0])
    assert found.clusters[:, 0].tolist() == [2, 1]
    assert token_clustering([tokens[None]], radius=2.0).clusters.item() == 1


def test_the_rank_of_isotropic_tokens():
    tokens = torch.cat([torch.eye(3), -torch.eye(3)])[None]
    assert token_clustering([tokens]).rank.item() == pytest.approx(3)


def test_a_trace_holds_scores_and_states_and_leaves_no_hook():
    net = InformationPropagationNet(depth=2, residual=False)
    x = torch.randn(2, 5, 2)
    scores, states = trace_layers(net, net.layers, x)
    expected = net.states(x)
    torch.testing.assert_close(states, expected)
    for layer, state, found in zip(net.layers, expected[:-1], scores, strict=True):
        torch.testing.assert_close(found, layer.scores(state))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.layers)


@pytest.mark.parametrize(
    'scores, message',
    [
        (torch.zeros(3, 4), 'L, L'),
        (torch.zeros(2, 2), 'L >= 3'),
        (torch.full((3, 3), -math.inf), 'finite'),
    ],
)
def test_bad_scores_are_refused(scores, message):
    with pytest.raises(ValueError, match=message):
        attention_geometry(scores)


@pytest.mark.parametrize(
    'states, message',
    [
        ([], 'none'),
        ([torch.zeros(1, 1, 4)], 'L >= 2'),
        ([torch.full((1, 2, 4), math.nan)], 'finite'),
    ],
)
def test_bad_states_are_refused(states, message):
    with pytest.raises(ValueError, match=message):
        token_clustering(states)
