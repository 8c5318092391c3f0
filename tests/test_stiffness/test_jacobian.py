import math

import numpy as np
import pytest
import torch
from torch import nn

from mmstepnet.stiffness import stiffness_aware_index, stiffness_index


def random_matrix(size, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    if kind == 'stable':  # all real parts negative: the leftmost eigenvalue counts
        matrix -= 2 * math.sqrt(size) * torch.eye(size)
    if kind == 'non-normal':
        matrix = torch.triu(matrix) + 0.1 * matrix
    return matrix


def exact(matrix):
    return np.abs(np.linalg.eigvals(matrix.numpy()).real).max()


@pytest.mark.parametrize('kind', ['gaussian', 'stable', 'non-normal'])
@pytest.mark.parametrize('size', [1, 2, 3, 7, 50, 120, 200])
@pytest.mark.parametrize('dense_below', [0, 512])
def test_random_matrices(size, kind, dense_below):
    matrix = random_matrix(size, size, kind)
    state = torch.randn(size, dtype=torch.float64)
    si = stiffness_index(lambda x: matrix @ x, state, dense_below=dense_below)
    assert si == pytest.approx(exact(matrix), rel=1e-8)


def test_complex_pair_counts_by_its_real_part():
    matrix = torch.zeros(60, 60, dtype=torch.float64)
    matrix[:2, :2] = torch.tensor([[-3.0, 50.0], [-50.0, -3.0]])  # -3 +- 50i
    matrix[2, 2] = 2.0
    state = torch.ones(60, dtype=torch.float64)
    assert stiffness_index(lambda x: matrix @ x, state, dense_below=0) == pytest.approx(3)


def test_nonlinear_field_equals_the_dense_jacobian_and_depends_on_the_state():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1))
    net.double()
    for scale in (0.1, 3.0):
        state = scale * torch.randn(1, 2, 6, 6, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(net, state).reshape(72, 72)
        si = stiffness_index(net, state, dense_below=0)
        assert si == pytest.approx(exact(jacobian), rel=1e-8)


@pytest.mark.parametrize('dense_below', [0, 512])
@pytest.mark.parametrize('matrix', [torch.zeros(90, 90), -torch.eye(90)])
def test_degenerate_spectra(matrix, dense_below):
    si = stiffness_index(lambda x: matrix @ x, torch.ones(90), dense_below=dense_below)
    assert si == pytest.approx(-matrix[0, 0].item(), abs=1e-6)


def test_a_batch_has_the_index_of_its_stiffest_sample():
    state = torch.tensor([[0.1], [2.0], [1.0]], dtype=torch.float64)
    assert stiffness_index(lambda x: -(x**2), state) == pytest.approx(4.0)


@pytest.mark.slow
def test_matrix_free_on_a_block_of_100_000_features():
    """A 1x1 convolution has its kernel's eigenvalues at every pixel: the answer is known."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)).eval().double()
    state = torch.randn(1, 64, 40, 40, dtype=torch.float64)
    kernel = block[0].weight.detach().view(64, 64) / math.sqrt(1 + block[1].eps)
    si = stiffness_index(lambda x: block(x), state, k=1)
    assert si == pytest.approx(exact(kernel), rel=1e-6)


def test_theorem_2():
    r"""SAI = SI sqrt(c + Q): on u' = A u, A normal with eigenvalue -a the stiffest, started on it.

    Then the quotient (exp(-a h) - 1) / h tends to SI as h -> 0, from below.
    """
    rates = torch.tensor([-50.0, -3.0, -0.5], dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    matrix = basis @ torch.diag(rates) @ basis.T
    si = stiffness_index(lambda x: matrix @ x, torch.zeros(3, dtype=torch.float64))
    assert si == pytest.approx(50, rel=1e-12)
    start = basis[:, 0]
    errors = []
    for h in (1e-2, 1e-3, 1e-4):
        times = h * torch.arange(3, dtype=torch.float64)
        states = torch.exp(rates[0] * times)[:, None] * start
        sai = stiffness_aware_index(states, times)
        expected = torch.full((2,), (1 - math.exp(-50 * h)) / h, dtype=torch.float64)
        torch.testing.assert_close(sai, expected)
        errors.append(1 - sai[0].item() / si)
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] == pytest.approx(50e-4 / 2, rel=1e-2)  # first order in h


def test_sai_of_a_mixture_is_si_times_a_constant_below_one():
    """For u = sum c_i v_i (v orthonormal): SAI^2 -> sum c_i^2 a_i^2 / sum c_i^2 <= SI^2."""
    rates = torch.tensor([-50.0, -3.0, -0.5], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    times = torch.tensor([0.0, 1e-7], dtype=torch.float64)
    states = weights * torch.exp(rates * times[:, None])
    expected = ((weights * rates).square().sum() / weights.square().sum()).sqrt()
    sai = stiffness_aware_index(states, times)
    assert sai.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sai.item() < 50


@pytest.mark.parametrize('dense_below', [0, 512])
def test_bad_fields(dense_below):
    state = torch.ones(100)
    with pytest.raises(ValueError, match='shape'):
        stiffness_index(lambda x: x[:3], state, dense_below=dense_below)
    with pytest.raises(ValueError, match='NaN or Inf'):
        stiffness_index(lambda x: x / 0, state, dense_below=dense_below)
    si = stiffness_index(lambda x: x / 0, state, dense_below=dense_below, nan_policy='omit')
    assert math.isnan(si)


def test_bad_arguments():
    with pytest.raises(TypeError, match='floating-point'):
        stiffness_index(lambda x: x, torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match='empty'):
        stiffness_index(lambda x: x, torch.ones(0))
    with pytest.raises(ValueError, match='k must'):
        stiffness_index(lambda x: x, torch.ones(3), k=0)


@pytest.mark.parametrize('dense_below', [0, 512])
def test_any_gradient_mode_gives_the_same(dense_below):
    matrix = random_matrix(60, 0, 'gaussian')
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            state = torch.randn(60, dtype=torch.float64)  # an inference tensor in the last
            value = stiffness_index(lambda x: matrix @ x, state, dense_below=dense_below)
        assert value == pytest.approx(exact(matrix), rel=1e-9)
