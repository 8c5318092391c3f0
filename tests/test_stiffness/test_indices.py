import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmstepnet.stiffness import neural_stiffness_index, stiffness_aware_index
from mmstepnet.stiffness.indices import divide_norms


def test_nsi_by_hand():
    state = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    increment = torch.tensor([[6.0, 8.0], [1.0, 0.0]])
    nsi = neural_stiffness_index(state, increment)
    assert nsi.dtype == torch.float64
    assert nsi.tolist() == [2.0, 0.5]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_nsi_of_lower_precision_is_that_of_the_same_values_in_float64(dtype):
    torch.manual_seed(0)
    state, increment = (100 * torch.randn(3, 8, 20, 20)).to(dtype), torch.randn(3, 8, 20, 20)
    increment = increment.to(dtype)
    expected = increment.double().flatten(1).norm(dim=1) / state.double().flatten(1).norm(dim=1)
    torch.testing.assert_close(
        neural_stiffness_index(state, increment), expected, rtol=1e-13, atol=0
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-6, 1e6))
def test_nsi_is_homogeneous(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    x, f = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    nsi = neural_stiffness_index(x, f)
    torch.testing.assert_close(neural_stiffness_index(scale * x, scale * f), nsi)
    torch.testing.assert_close(neural_stiffness_index(x, scale * f), scale * nsi)


def test_nsi_gradient():
    torch.manual_seed(0)
    x, f = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(neural_stiffness_index, (x, f))


def test_nsi_that_is_not_defined_leaves_the_other_gradients_alone():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    f = torch.tensor([[1.0, 0.0], [0.0, 5.0]], requires_grad=True)
    nsi = neural_stiffness_index(x, f, nan_policy='omit')
    assert nsi.isnan().tolist() == [True, False] and nsi[1] == 1
    nsi.nansum().backward()
    # d(|f|/|x|)/dx = -|f| x / |x|^3, and nothing from the sample without an index.
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, 0.0], [-0.12, -0.16]]))
    assert f.grad.isfinite().all()


@pytest.mark.parametrize(
    'sample, what',
    [([0.0, 0.0], 'norm zero'), ([math.nan, 1.0], 'NaN or Inf'), ([math.inf, 1.0], 'NaN or Inf')],
)
def test_nsi_names_the_sample(sample, what):
    state = torch.tensor([[1.0, 1.0], sample])
    with pytest.raises(ValueError, match=f'sample 1.*{what}'):
        neural_stiffness_index(state, torch.ones(2, 2))


def test_eps_is_where_zero_begins():
    state = torch.tensor([[1e-3, 0.0]])
    assert neural_stiffness_index(state, state, eps=1e-4) == 1
    with pytest.raises(ValueError, match='norm zero'):
        neural_stiffness_index(state, state, eps=1e-2)
    with pytest.raises(ValueError, match='eps'):
        neural_stiffness_index(state, state, eps=-1.0)


def test_norms_name_block_and_sample():
    state = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match=r'block layer1\.1, sample 1'):
        divide_norms(torch.ones(2, 2), state, names=['layer1.0', 'layer1.1'])


def test_nsi_rejects_what_it_cannot_pair():
    with pytest.raises(ValueError, match='same shape'):
        neural_stiffness_index(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match='at least one sample'):
        neural_stiffness_index(torch.ones(0, 3), torch.ones(0, 3))
    with pytest.raises(ValueError, match='nan_policy'):
        neural_stiffness_index(torch.ones(2, 3), torch.ones(2, 3), nan_policy='propagate')


def test_sai_by_hand():
    states = torch.tensor([[1.0, 0.0], [1.0, 2.0], [3.0, 2.0]])
    sai = stiffness_aware_index(states, torch.tensor([0.0, 0.5, 1.5]))
    torch.testing.assert_close(sai, torch.tensor([4.0, 2 / math.sqrt(5)], dtype=torch.float64))


def test_sai_of_many_trajectories_and_backwards_in_time():
    torch.manual_seed(0)
    states, times = torch.randn(5, 3, 4), torch.tensor([0.0, 1.0, 1.5, 4.0, 4.25])
    sai = stiffness_aware_index(states, times)
    assert sai.shape == (4, 3)
    for n in range(3):
        torch.testing.assert_close(sai[:, n], stiffness_aware_index(states[:, n], times))
    torch.testing.assert_close(stiffness_aware_index(states, -times), sai)


def test_sai_is_nsi_where_the_network_is_the_solver():
    """With dt = 1 the two definitions are the same quotient."""
    torch.manual_seed(0)
    x, f = torch.randn(2, 6, 10, dtype=torch.float64)
    sai = stiffness_aware_index(torch.stack([x, x + f]), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(sai[0], neural_stiffness_index(x, f))


@pytest.mark.parametrize(
    'states, times, message',
    [
        (torch.ones(1, 2), torch.zeros(1), 'at least two'),
        (torch.ones(3, 2), torch.zeros(2), 'one time for each'),
        (torch.ones(3, 2), torch.tensor([0.0, 1.0, 1.0]), 'strictly'),
        (torch.ones(3, 2), torch.tensor([0.0, 1.0, 0.5]), 'strictly'),
        (torch.ones(3), torch.arange(3.0), 'dimensions'),
        (torch.zeros(2, 2), torch.arange(2.0), 'step 0'),
        (torch.tensor([[[1.0], [0.0]], [[1.0], [1.0]]]), torch.arange(2.0), 'trajectory 1'),
    ],
)
def test_sai_names_what_is_wrong(states, times, message):
    with pytest.raises(ValueError, match=message):
        stiffness_aware_index(states, times)


def test_sai_omits_on_request():
    states = torch.tensor([[[1.0], [0.0]], [[2.0], [1.0]]])
    sai = stiffness_aware_index(states, torch.arange(2.0), nan_policy='omit')
    assert sai[0, 0] == 1 and sai[0, 1].isnan()
