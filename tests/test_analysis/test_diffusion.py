import math

import pytest
import torch
from scipy.special import ive

from mmstepnet.analysis.diffusion import (
    CIRCLE,
    SPHERE,
    TORUS,
    attention_step,
    diffusion_generator,
    step_error,
)


def height(u):
    return u[0].cos()


def tilt(u):
    return 0.7 * u[0].cos()


def wave(u):
    return u[0].sin() * u[1].cos()


def test_attention_step_is_the_softmax_of_scaled_squared_distances():
    points, values = torch.randn(6, 3).double(), torch.randn(6).double()
    weights = torch.tensor([1.0, 2, 3, 1, 1, 2]).double()
    out = attention_step(points, values, 0.3, log_weights=weights.log())
    for i in range(6):
        kernel = [
            w * math.exp(-sum((points[i] - points[j]) ** 2) / 0.6)
            for j, w in enumerate(weights.tolist())
        ]
        expected = sum(k * v for k, v in zip(kernel, values.tolist(), strict=True)) / sum(kernel)
        assert out[i].item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match='eps=0'):
        attention_step(points, values, 0)


def saddle(u):
    # The product of two coordinates in space. A single one, a first harmonic, has no error of
    # second order on the uniform sphere.
    return u[0].sin() * u[1].cos() * u[0].cos()


@pytest.mark.parametrize('eps', [1.0, 0.1, 0.01, 0.001])
def test_on_the_uniform_circle_the_step_is_a_quotient_of_bessel_functions(eps):
    # With |x - y|^2 = 2 - 2 cos, integrals over the circle are I_1(1/eps) and I_0(1/eps).
    angles = CIRCLE.grid(2000)
    out = attention_step(CIRCLE.points(angles), angles[:, 0].cos(), eps)
    expected = ive(1, 1 / eps) / ive(0, 1 / eps) * angles[:, 0].cos()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_circle_error_is_eps_squared_over_eight_over_three_decades():
    # I_1(k) / I_0(k) = 1 - 1/(2 k) - 1/(8 k^2) - O(k^-3).
    keys, queries = CIRCLE.grid(1000), CIRCLE.grid(16)
    largest = queries[:, 0].cos().abs().max().item()
    for eps in (0.1, 0.01, 0.001, 0.0001):
        error = step_error(CIRCLE, height, queries, keys, eps, quadrature=True)
        assert error == pytest.approx(largest * eps**2 / 8, rel=1.5 * eps + 1e-4)


@pytest.mark.parametrize(
    'manifold, function, density, counts, queries',
    [
        (CIRCLE, height, tilt, (1500,), CIRCLE.grid(16)),
        (SPHERE, saddle, None, (120, 200), torch.tensor([[1.2, 0.3], [1.7, 2.0]])),
        (SPHERE, saddle, tilt, (120, 200), torch.tensor([[1.2, 0.3], [1.7, 2.0]])),
        (TORUS, wave, None, (240, 120), torch.tensor([[0.4, 0.3], [1.7, 2.0]])),
        (TORUS, wave, tilt, (240, 120), torch.tensor([[0.4, 0.3], [1.7, 2.0]])),
    ],
)
def test_theorem_3_halving_eps_quarters_the_error(manifold, function, density, counts, queries):
    keys = manifold.grid(*counts)
    errors = [
        step_error(manifold, function, queries.double(), keys, eps, density, quadrature=True)
        for eps in (0.02, 0.01, 0.005)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)


def test_without_the_density_term_the_error_is_only_first_order():
    keys, queries = CIRCLE.grid(1500), CIRCLE.grid(16)
    points = CIRCLE.points(keys)
    cos, angle = keys[:, 0].cos(), queries[:, 0]
    errors = []
    for eps in (0.02, 0.01):
        out = attention_step(points, cos, eps, CIRCLE.points(queries), 0.7 * cos)
        errors.append((out - (1 - eps / 2) * angle.cos()).abs().max().item())
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.1)


def test_generators_by_hand():
    u = torch.tensor([[0.9, 0.4], [2.0, 5.0]]).double()
    a, b = u.unbind(-1)
    torch.testing.assert_close(
        diffusion_generator(CIRCLE, height, u[:, :1], tilt), -a.cos() + 1.4 * a.sin().square()
    )
    # cos(polar) is the first harmonic of the sphere, with eigenvalue -2.
    torch.testing.assert_close(diffusion_generator(SPHERE, height, u), -2 * a.cos())
    # With h = sin(a) cos(b) and radius R(b) = 1 + cos(b) / 2 around:
    # h_aa / R^2 + 4 h_bb - 2 sin(b) h_b / R.
    radius = 1 + b.cos() / 2
    expected = -a.sin() * b.cos() * (1 / radius**2 + 4) + 2 * a.sin() * b.sin() ** 2 / radius
    torch.testing.assert_close(diffusion_generator(TORUS, wave, u), expected)


def test_the_metric_of_the_torus():
    u = torch.tensor([0.9, 0.4]).double()
    radius = 1 + math.cos(0.4) / 2
    expected = torch.diag(torch.tensor([radius**2, 0.25]).double())
    torch.testing.assert_close(TORUS.metric(u), expected)


def test_samples_follow_the_density():
    generator = torch.Generator().manual_seed(0)
    polar = SPHERE.sample(20_000, generator)[:, 0]
    assert polar.cos().square().mean().item() == pytest.approx(1 / 3, abs=0.01)
    angle = CIRCLE.sample(20_000, generator, tilt)[:, 0]
    # Mean of cos under exp(0.7 cos) is I_1(0.7) / I_0(0.7).
    assert angle.cos().mean().item() == pytest.approx(ive(1, 0.7) / ive(0, 0.7), abs=0.015)


def test_random_points_come_closer_with_their_number():
    generator = torch.Generator().manual_seed(0)
    queries = CIRCLE.grid(16)
    errors = [
        sum(
            step_error(CIRCLE, height, queries, CIRCLE.sample(n, generator), 0.05) for _ in range(5)
        )
        for n in (200, 20_000)
    ]
    # A hundred times the points, a tenth of the error.
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.5)
