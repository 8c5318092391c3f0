import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstepnet.stiffness import stiffness_degree, stiffness_proportion, total_neural_stiffness


def random_nsi(seed, samples=7, stages=(0, 0, 0, 3, 3, 1, 1, 1, 1)):
    generator = torch.Generator().manual_seed(seed)
    stages = torch.tensor(stages)
    nsi = torch.rand(samples, len(stages), generator=generator, dtype=torch.float64) ** 3
    return 4 * nsi, stages


THRESHOLDS = [0.1, 0.5], [0.1, 1.0]
THREE_FUNCTIONS = (
    (total_neural_stiffness, ()),
    (stiffness_degree, THRESHOLDS),
    (stiffness_proportion, THRESHOLDS),
)


def rectangles(row, stages):
    """(width, height) of every block's rectangle of thresholds, written as in the definition."""
    for value, stage in zip(row, stages, strict=True):
        mean = np.mean([v for v, s in zip(row, stages, strict=True) if s == stage])
        yield max(value / mean - 1, 0), value


def area_by_compression(boxes):
    """Area of a union of boxes [0, w] x [0, h]: cut the plane at every edge, keep covered cells."""
    boxes = list(boxes)
    xs = sorted({0.0, *(w for w, _ in boxes)})
    ys = sorted({0.0, *(h for _, h in boxes)})
    area = 0.0
    for x0, x1 in itertools.pairwise(xs):
        for y0, y1 in itertools.pairwise(ys):
            if any(w >= x1 and h >= y1 for w, h in boxes):
                area += (x1 - x0) * (y1 - y0)
    return area


def brute_force(nsi, stages, m1, m2):
    """Both surfaces from their definitions, a loop over everything."""
    nsi, stages = nsi.numpy(), stages.numpy()
    means = np.stack([nsi[:, stages == s].mean(axis=1) for s in stages], axis=1)
    delta, p_hat = np.zeros((2, len(m1), len(m2)))
    for i, a in enumerate(m1):
        for j, b in enumerate(m2):
            stiff = nsi >= np.maximum(means * (1 + float(a)), float(b))
            delta[i, j], p_hat[i, j] = stiff.any(axis=1).mean(), stiff.mean()
    return torch.from_numpy(delta), torch.from_numpy(p_hat)


def test_tns_by_hand():
    # Stage 5: mean 2, so [0, 0.5] x [0, 3]. Stage 2: mean 4, so [0, 1] x [0, 8], which covers it.
    # Second sample: [0, 1] x [0, 2] and [0, 0.5] x [0, 6], a staircase of 2 + 0.5 * 4.
    nsi = torch.tensor([[1.0, 3.0, 0.0, 8.0], [0.0, 2.0, 2.0, 6.0]])
    tns = total_neural_stiffness(nsi, torch.tensor([5, 5, 2, 2]))
    assert tns.per_sample.tolist() == [8.0, 4.0]
    assert tns.mean == 6.0
    assert tns.std_error == 2.0  # deviations of 2, N - 1 = 1: s = sqrt(8), s / sqrt(2) = 2


@pytest.mark.parametrize('seed', range(20))
def test_tns_is_the_area_of_the_union(seed):
    nsi, stages = random_nsi(seed)
    expected = [area_by_compression(rectangles(row, stages.tolist())) for row in nsi.tolist()]
    tns = total_neural_stiffness(nsi, stages)
    np.testing.assert_allclose(tns.per_sample.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(tns.mean, np.mean(expected), rtol=1e-12)
    np.testing.assert_allclose(
        tns.std_error, np.std(expected, ddof=1) / math.sqrt(len(expected)), rtol=1e-12
    )


def test_tns_agrees_with_a_grid_to_the_grids_resolution():
    nsi, stages = random_nsi(0, samples=50)
    extent, size = 4.0, 60  # no width exceeds 3 in stages of up to four blocks, no height 4
    middles = (torch.arange(size, dtype=torch.float64) + 0.5) * extent / size
    delta = brute_force(nsi, stages, middles, middles)[0]
    # The border of a staircase crosses fewer than 2 * size cells; each is missed by half at most.
    bound = 0.5 * 2 * size * (extent / size) ** 2
    grid = delta.sum() * (extent / size) ** 2
    assert abs(grid - total_neural_stiffness(nsi, stages).mean) < bound


@pytest.mark.parametrize('seed', range(10))
def test_surfaces_equal_their_definitions(seed):
    nsi, stages = random_nsi(seed)
    generator = torch.Generator().manual_seed(seed)
    m1 = 3 * torch.rand(9, generator=generator, dtype=torch.float64)  # unsorted, twice the same
    m1[3], m1[4] = m1[5], 0
    m2 = 4 * torch.rand(6, generator=generator, dtype=torch.float64)
    delta, p_hat = brute_force(nsi, stages, m1, m2)
    torch.testing.assert_close(stiffness_degree(nsi, stages, m1, m2), delta, rtol=0, atol=1e-15)
    torch.testing.assert_close(stiffness_proportion(nsi, stages, m1, m2), p_hat, rtol=0, atol=1e-15)


def test_thresholds_are_inclusive():
    # Mean 1.5; the larger NSI is exactly 1.5 * (1 + 1/3), though 2 / 1.5 - 1 rounds below 1/3.
    nsi, stages = torch.tensor([[1.0, 2.0]]), torch.tensor([0, 0])
    above = np.nextafter(2.0, 3.0)
    expected = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert torch.equal(stiffness_degree(nsi, stages, [1 / 3], [2.0, above]), expected)
    assert torch.equal(stiffness_proportion(nsi, stages, [1 / 3], [2.0, above]), expected / 2)


def test_blocks_of_equal_stiffness_reach_their_mean():
    # The mean of three 0.1 rounds above 0.1; it is still no block's inferior at M1 = 0.
    nsi, stages = torch.full((1, 3), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert stiffness_degree(nsi, stages, [0.0], [0.0, 0.1]).tolist() == [[1.0, 1.0]]
    assert stiffness_proportion(nsi, stages, [0.0], [0.1]).item() == 1
    assert total_neural_stiffness(nsi, stages).mean.item() == pytest.approx(0, abs=1e-15)


def test_stage_of_one_block_has_no_width():
    tns = total_neural_stiffness(torch.tensor([[0.3, 7.0]]), torch.tensor([0, 1]))
    assert tns.mean == 0
    assert tns.std_error.isnan()


def test_a_stage_that_stands_still():
    nsi, stages = torch.tensor([[0.0, 0.0, 1.0, 3.0]]), torch.tensor([0, 0, 1, 1])
    assert total_neural_stiffness(nsi, stages).mean == 1.5
    assert stiffness_degree(nsi, stages, [9.0], [0.0]).item() == 1  # 0 >= max(0 * 10, 0)
    assert stiffness_proportion(nsi, stages, [9.0], [0.0]).item() == 0.5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.0078125, 64, width=16), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(-1, 2), min_size=5, max_size=5),
)
def test_double_integrals(rows, labels):
    """delta integrates to TNS, p-hat to E[(1/L) sum_t max(0, NSI_t / mu - 1) NSI_t]."""
    nsi, stages = torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)
    boxes = [list(rectangles(row, labels)) for row in nsi.tolist()]
    edges = [
        torch.tensor(sorted({0.0, *(box[axis] for row in boxes for box in row)})) for axis in (0, 1)
    ]
    if min(map(len, edges)) < 2:
        assert total_neural_stiffness(nsi, stages).mean < 1e-12
        return
    # Both surfaces are constant between the edges, so the midpoint rule is exact.
    middles = [(edge[1:] + edge[:-1]) / 2 for edge in edges]
    cells = torch.outer(edges[0].diff(), edges[1].diff())
    tns = total_neural_stiffness(nsi, stages).mean
    delta = (stiffness_degree(nsi, stages, *middles) * cells).sum()
    torch.testing.assert_close(delta, tns, rtol=1e-9, atol=1e-9)
    p_hat = (stiffness_proportion(nsi, stages, *middles) * cells).sum()
    expected = np.mean([w * h for row in boxes for w, h in row])
    assert p_hat.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_tns_scales_with_nsi_and_ignores_order_and_labels(seed, scale):
    nsi, stages = random_nsi(seed, samples=3)
    tns = total_neural_stiffness(nsi, stages).per_sample
    torch.testing.assert_close(total_neural_stiffness(scale * nsi, stages).per_sample, scale * tns)
    order = torch.randperm(len(stages), generator=torch.Generator().manual_seed(seed))
    shuffled = total_neural_stiffness(nsi[:, order], 10 - 3 * stages[order]).per_sample
    torch.testing.assert_close(shuffled, tns)


def test_gradient():
    nsi, stages = random_nsi(3, samples=2)
    nsi.requires_grad_()
    for output in (0, 1, 2):
        assert torch.autograd.gradcheck(
            lambda x, i=output: total_neural_stiffness(x, stages)[i], nsi
        )


def test_float32_is_computed_in_float64():
    nsi, stages = random_nsi(0)
    nsi = nsi.float()
    expected = total_neural_stiffness(nsi.double(), stages)
    assert torch.equal(total_neural_stiffness(nsi, stages).per_sample, expected.per_sample)


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_samples_without_nsi(bad):
    nsi, stages = random_nsi(0)
    nsi[2, 4] = bad
    rest = torch.cat([nsi[:2], nsi[3:]])
    m = ([0.1, 0.5], [0.1, 1.0])
    for func in (total_neural_stiffness, stiffness_degree, stiffness_proportion):
        extra = () if func is total_neural_stiffness else m
        with pytest.raises(ValueError, match='sample 2, block 4'):
            func(nsi, stages, *extra)
        omitted, kept = func(nsi, stages, *extra, nan_policy='omit'), func(rest, stages, *extra)
        if func is total_neural_stiffness:
            assert omitted.num_omitted == 1 and omitted.per_sample[2].isnan()
            omitted, kept = omitted.mean, kept.mean
        torch.testing.assert_close(omitted, kept)
    with pytest.raises(ValueError, match='nothing is left'):
        total_neural_stiffness(nsi[2:3], stages, nan_policy='omit')


@pytest.mark.parametrize(
    'nsi, stages, error, message',
    [
        (torch.ones(0, 3), torch.zeros(3, dtype=torch.int64), ValueError, 'empty'),
        (torch.ones(3, 0), torch.zeros(0, dtype=torch.int64), ValueError, 'empty'),
        (torch.ones(3), torch.zeros(3, dtype=torch.int64), ValueError, 'dimensions'),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), ValueError, 'one label'),
        (torch.ones(2, 3), torch.zeros(3), TypeError, 'integers'),
        (torch.ones(2, 3), ['a', 'b', 'c'], TypeError, 'stages'),
        (torch.ones(2, 3), None, TypeError, 'stages'),
        (None, torch.zeros(3, dtype=torch.int64), TypeError, 'nsi'),
        (-torch.ones(2, 3), torch.zeros(3, dtype=torch.int64), ValueError, 'negative'),
    ],
)
def test_bad_tables(nsi, stages, error, message):
    for func, axes in THREE_FUNCTIONS:
        with pytest.raises(error, match=message):
            func(nsi, stages, *axes)


@pytest.mark.parametrize('kind', [torch.Tensor.tolist, torch.Tensor.numpy])
def test_lists_and_arrays_are_tables_too(kind):
    nsi, stages = random_nsi(0)
    for func, axes in THREE_FUNCTIONS:
        got, expected = func(kind(nsi), kind(stages), *axes), func(nsi, stages, *axes)
        assert all(map(torch.equal, got, expected))  # to the last bit


@pytest.mark.parametrize('name', ['m1', 'm2'])
@pytest.mark.parametrize('bad', [[0.5, -0.1], [math.inf], [], [[0.1]]])
def test_bad_thresholds(name, bad):
    nsi, stages = random_nsi(0)
    for func in (stiffness_degree, stiffness_proportion):
        with pytest.raises(ValueError, match=name):
            func(nsi, stages, **{'m1': [0.5], 'm2': [0.5], name: bad})


def test_theorem_1_on_a_linear_system():
    """Euler's method on u' = A u: thresholds beyond (L - 1, ||A||) are never reached."""
    matrix = torch.diag(torch.tensor([-30.0, -4.0, -0.1], dtype=torch.float64))
    state = torch.randn(20, 3, dtype=torch.float64)
    columns = []
    for _ in range(6):
        field = state @ matrix.T
        columns.append(field.norm(dim=1) / state.norm(dim=1))
        state = state + 0.05 * field
    nsi, stages = torch.stack(columns, dim=1), torch.zeros(6, dtype=torch.int64)
    assert nsi.max() <= 30
    beyond = stiffness_degree(nsi, stages, [0.0, 5.0 + 1e-9], [0.0, 30.0 + 1e-9])
    assert beyond.tolist() == [[1, 0], [0, 0]]
    assert 0 < total_neural_stiffness(nsi, stages).mean < 5 * 30
