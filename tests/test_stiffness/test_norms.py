import pytest
import torch

from mmstepnet.stiffness import norms


@pytest.mark.parametrize('shape', [(3, 7), (3, 7, 5), (3, 7, 5, 4), (2, 40, 60, 60)])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_equal_the_plain_norm_in_float64(shape, dtype):
    x, y = torch.randn(2, *shape).to(dtype)
    gate = torch.rand(shape[:2] + (1,) * (len(shape) - 2)).to(dtype)
    before = x.clone(), y.clone()
    for minus, times in ((None, None), (y, None), (None, gate), (y, gate)):
        expected = x.double()
        expected = expected if minus is None else expected - minus.double()
        expected = expected if times is None else expected * times.double()
        expected = expected.flatten(1).square().sum(1).sqrt()
        result = norms.sample_norms(x, minus, times)
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=0)
        # They are the network's own.
        assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_memory_format_does_not_matter():
    x = torch.randn(2, 8, 6, 6)
    strided = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(norms.sample_norms(strided), norms.sample_norms(x))


def test_both_ways_agree(monkeypatch):
    x, gate = torch.randn(5, 3, 4, 4), torch.rand(1, 3, 1, 1)
    expected = norms.sample_norms(x, times=gate)
    monkeypatch.setattr(norms, '_CPU_CHUNK', 1)
    torch.testing.assert_close(norms.sample_norms(x, times=gate), expected)
    monkeypatch.setattr(norms, '_ACCELERATOR_CHUNK', 100)
    flat = (x * gate).flatten(1)
    torch.testing.assert_close(norms.sample_norms(flat), expected, rtol=1e-6, atol=0)


def test_mean_quotient_skips_zeros():
    before = torch.tensor([[1.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    mean = norms.mean_quotient(torch.tensor([[0.5, 0.0, 1.0]]).expand(2, 3) * (before > 0), before)
    assert mean[0] == 0.375 and mean[1].isnan()


@pytest.mark.parametrize('shape', [(0, 3, 4, 4), (2, 0, 4, 4), (0, 5)])
def test_nothing_has_no_norm(shape):
    with pytest.raises(ValueError, match='nothing to take a norm of'):
        norms.sample_norms(torch.empty(shape))
