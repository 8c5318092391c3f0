import itertools
import math

import numpy as np
import pytest
import torch

from mmstepnet.stiffness import rank_correlation, step_size_correlation


def test_rank_correlation_by_hand():
    # One of the six pairs is discordant: tau = (5 - 1) / 6. Rank differences 0 0 1 1:
    # rho = 1 - 6 * 2 / (4 * 15).
    result = rank_correlation(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([70.0, 75, 90, 80]))
    assert result.kendall.statistic.item() == pytest.approx(2 / 3)
    assert result.spearman.statistic.item() == pytest.approx(0.8)
    # Of the 24 orders, one has tau 1 and three have 2/3; two-sided, that is 8 of 24.
    assert result.kendall.p_value.item() == pytest.approx(8 / 24)
    # Those four orders are at the same time the ones with rho >= 0.8.
    assert result.spearman.p_value.item() == pytest.approx(8 / 24)


def test_three_models_prove_nothing():
    """Of six orders of three values, two agree perfectly up to the sign."""
    result = rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 40.0]))
    assert result.spearman.statistic.item() == pytest.approx(1)
    assert result.spearman.p_value.item() == pytest.approx(2 / 6)
    assert result.kendall.p_value.item() == pytest.approx(2 / 6)


def test_pearson_p_value_is_that_of_the_t_distribution():
    """With two degrees of freedom Student's distribution has a closed form."""
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 5.0])
    r = np.corrcoef(x, y)[0, 1]
    t = r * math.sqrt(2 / (1 - r * r))
    result = rank_correlation(x, y).pearson
    assert result.statistic.item() == pytest.approx(r)
    assert result.p_value.item() == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_step_size_correlation_goes_block_by_block():
    generator = torch.Generator().manual_seed(0)
    nsi, dt = torch.rand(2, 12, 3, generator=generator, dtype=torch.float64)
    dt[:, 1] = 3 - 2 * nsi[:, 1]
    result = step_size_correlation(nsi, dt)
    assert result.pearson.statistic.shape == (3,)
    for correlation in result:
        assert correlation.statistic[1].item() == pytest.approx(-1)
    for block in range(3):
        x, y = nsi[:, block], dt[:, block]
        assert result.pearson.statistic[block].item() == pytest.approx(np.corrcoef(x, y)[0, 1])
        ranks = [v.argsort().argsort().numpy() for v in (x, y)]
        rho = np.corrcoef(*ranks)[0, 1]
        assert result.spearman.statistic[block].item() == pytest.approx(rho)
        signs = [
            torch.sign((x[i] - x[j]) * (y[i] - y[j]))
            for i, j in itertools.combinations(range(12), 2)
        ]
        assert result.kendall.statistic[block].item() == pytest.approx(float(sum(signs)) / 66)
        one = step_size_correlation(x, y)
        assert one.kendall.p_value == result.kendall.p_value[block]


def test_what_has_no_correlation():
    nsi = torch.rand(4, 2)
    dt = torch.rand(4, 2)
    dt[:, 1] = 1
    with pytest.raises(ValueError, match='dt of block 1 never changes'):
        step_size_correlation(nsi, dt)
    omitted = step_size_correlation(nsi, dt, nan_policy='omit')
    assert omitted.pearson.statistic.isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match='single value'):
        rank_correlation(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match='same shape'):
        step_size_correlation(nsi, dt[:, :1])
    with pytest.raises(ValueError, match='pair'):
        rank_correlation(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match='empty'):
        rank_correlation(torch.ones(0), torch.ones(0))


def test_missing_values():
    tns = torch.tensor([1.0, 2.0, math.nan, 4.0])
    accuracy = torch.tensor([1.0, 3.0, 2.0, 2.0])
    with pytest.raises(ValueError, match='tns holds nan at 2'):
        rank_correlation(tns, accuracy)
    expected = rank_correlation(tns[[0, 1, 3]], accuracy[[0, 1, 3]])
    assert rank_correlation(tns, accuracy, nan_policy='omit') == expected


def test_kendall_p_value_counts_the_orders_with_ties_too():
    tns, accuracy = torch.tensor([1.0, 2, 3, 4, 5]), torch.tensor([1.0, 1, 2, 3, 3])
    result = rank_correlation(tns, accuracy).kendall
    assert result.statistic.item() == pytest.approx(8 / math.sqrt(10 * 8))
    # Agreeing less disagreeing pairs are 8 for 4 of the 120 orders, -8 for as many.
    assert result.p_value.item() == pytest.approx(8 / 120)
