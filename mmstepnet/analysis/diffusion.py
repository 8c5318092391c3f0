r"""One attention step as a step of diffusion on the manifold that the tokens lie on.

Theorem 3 of Ruan, Zhang: Towards understanding how attention mechanism works in deep learning,
2024, https://arxiv.org/abs/2412.18288, derived anew: points
:math:`x_j` with density p on a manifold without border, weights
:math:`\mathrm{softmax}_j(-\|x_i - x_j\|^2 / 2\varepsilon)`, values h. For many points

.. math:: (A h)(x) = h + \tfrac{\varepsilon}{2} (\Delta h + 2 \langle \nabla \log p, \nabla h
    \rangle) + O(\varepsilon^2).

For smooth f, :math:`\int e^{-|x-y|^2/2\varepsilon} f(y) dy \propto f + \tfrac{\varepsilon}{2}
(\Delta f + w f) + O(\varepsilon^2)`, where w comes from the curvature of the manifold. Attention is
the quotient of that for :math:`f = h p` and for :math:`f = p`: w cancels, and
:math:`(\Delta(h p) - h \Delta p) / p = \Delta h + 2 \langle \nabla \log p, \nabla h \rangle`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ScalarFunction = Callable[[Tensor], Tensor]
"""Coordinates (d,) to a number (), in torch operations."""


@dataclass(frozen=True)
class Manifold:
    """A manifold in space, described by coordinates in a box.

    Args:
        name: What it is called in figures.
        embed: Coordinates (d,) to a point in space (D,), in torch operations.
        lower: Lower end of every coordinate.
        upper: Upper end of every coordinate.
    """

    name: str
    embed: ScalarFunction
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    def points(self, coordinates: Tensor) -> Tensor:
        """Coordinates (N, d) to points (N, D)."""
        return torch.func.vmap(self.embed)(coordinates)

    def metric(self, coordinates: Tensor) -> Tensor:
        """The metric tensor g at one point (d,), (d, d)."""
        jacobian = torch.func.jacfwd(self.embed)(coordinates)
        return jacobian.T @ jacobian

    def volume(self, coordinates: Tensor) -> Tensor:
        """Volume element sqrt(det g) at points (N, d), (N,)."""
        return torch.func.vmap(lambda u: _volume(self.metric(u)))(coordinates)

    def grid(self, *counts: int) -> Tensor:
        """Midpoints of a regular grid in the box, (prod(counts), d), float64."""
        axes = [
            low + (torch.arange(n, dtype=torch.float64) + 0.5) * (high - low) / n
            for n, low, high in zip(counts, self.lower, self.upper, strict=True)
        ]
        return torch.stack(torch.meshgrid(*axes, indexing='ij'), -1).flatten(0, -2)

    def sample(
        self, count: int, generator: torch.Generator, log_density: ScalarFunction | None = None
    ) -> Tensor:
        """Independent random coordinates (count, d), float64, by rejection in the box.

        Args:
            count: Points wanted.
            generator: Source of randomness.
            log_density: log p up to a constant, p per volume; uniform by default.
        """
        lower = torch.tensor(self.lower, dtype=torch.float64)
        upper = torch.tensor(self.upper, dtype=torch.float64)

        def log_weight(u: Tensor) -> Tensor:
            weight = self.volume(u).log()
            return weight if log_density is None else weight + torch.func.vmap(log_density)(u)

        # A grid misses the maximum by little; the margin keeps rejection exact.
        bound = log_weight(self.grid(*[64] * len(self.lower))).max() + 0.05
        kept, missing = [], count
        while missing > 0:
            u = torch.rand(4 * count, len(lower), dtype=torch.float64, generator=generator)
            u = lower + u * (upper - lower)
            chance = torch.rand(4 * count, dtype=torch.float64, generator=generator)
            kept.append(u[chance.log() < log_weight(u) - bound])
            missing -= len(kept[-1])
        return torch.cat(kept)[:count]


def _volume(metric: Tensor) -> Tensor:
    """sqrt(det g)."""
    return torch.linalg.cholesky(metric).diagonal().prod()


def _circle(u: Tensor) -> Tensor:
    return torch.cat([u.cos(), u.sin()])


def _sphere(u: Tensor) -> Tensor:
    polar, azimuth = u
    x, y = polar.sin() * azimuth.cos(), polar.sin() * azimuth.sin()
    return torch.stack([x, y, polar.cos()])


def _torus(u: Tensor) -> Tensor:
    around, across = u
    distance = 1 + 0.5 * across.cos()
    return torch.stack([distance * around.cos(), distance * around.sin(), 0.5 * across.sin()])


CIRCLE = Manifold('circle', _circle, (0.0,), (2 * math.pi,))
"""Unit circle by its angle."""

SPHERE = Manifold('sphere', _sphere, (0.0, 0.0), (math.pi, 2 * math.pi))
"""Unit sphere by the angle from the pole and the azimuth."""

TORUS = Manifold('torus', _torus, (0.0, 0.0), (2 * math.pi, 2 * math.pi))
"""Ring torus with radii 1 (around) and 1/2 (across)."""


def attention_step(
    points: Tensor,
    values: Tensor,
    eps: float,
    queries: Tensor | None = None,
    log_weights: Tensor | None = None,
) -> Tensor:
    r"""Values after one step of attention with the kernel
    :math:`\exp(-\|x_i - x_j\|^2 / 2\varepsilon)`.

    Args:
        points: Keys x_j, (N, D).
        values: h_j, (N,) or (N, K).
        eps: Step size, positive.
        queries: x_i, (M, D); the points themselves by default.
        log_weights: (N,), log of how many points each key stands for; for quadrature instead of
            random points.

    Returns:
        Tensor: (M,) or (M, K).

    Raises:
        ValueError: ``eps`` is not positive.
    """
    if not eps > 0:
        raise ValueError(f'eps={eps} must be positive')
    queries = points if queries is None else queries
    scores = -torch.cdist(queries, points, compute_mode='donot_use_mm_for_euclid_dist').square()
    scores = scores / (2 * eps)
    if log_weights is not None:
        scores = scores + log_weights
    return scores.softmax(-1) @ values


def diffusion_generator(
    manifold: Manifold,
    function: ScalarFunction,
    coordinates: Tensor,
    log_density: ScalarFunction | None = None,
) -> Tensor:
    r""":math:`\Delta h + 2 \langle \nabla \log p, \nabla h \rangle` by automatic differentiation.

    In coordinates that is :math:`\partial_i (\sqrt{g} p^2 g^{ij} \partial_j h) / (\sqrt{g} p^2)`,
    with p = 1 the Laplace-Beltrami operator.

    Args:
        manifold: Where the points lie.
        function: h, of one point's coordinates.
        coordinates: Where to evaluate, (M, d), away from the coordinates' singular points.
        log_density: log p up to a constant, of one point's coordinates; uniform by default.

    Returns:
        Tensor: (M,).
    """

    def density(u: Tensor) -> Tensor:
        weight = _volume(manifold.metric(u))
        return weight if log_density is None else weight * (2 * log_density(u)).exp()

    def flux(u: Tensor) -> Tensor:
        gradient = torch.func.grad(function)(u)
        return density(u) * (torch.linalg.inv(manifold.metric(u)) @ gradient)

    def generator(u: Tensor) -> Tensor:
        return torch.func.jacfwd(flux)(u).trace() / density(u)

    return torch.func.vmap(generator)(coordinates)


def diffusion_step(
    manifold: Manifold,
    function: ScalarFunction,
    coordinates: Tensor,
    eps: float,
    log_density: ScalarFunction | None = None,
) -> Tensor:
    r""":math:`h + \tfrac{\varepsilon}{2} (\Delta h + 2 \langle \nabla \log p, \nabla h \rangle)`,
    what :func:`attention_step` approximates up to :math:`O(\varepsilon^2)`; arguments as for
    :func:`diffusion_generator`.
    """
    generator = diffusion_generator(manifold, function, coordinates, log_density)
    return torch.func.vmap(function)(coordinates) + eps / 2 * generator


def step_error(
    manifold: Manifold,
    function: ScalarFunction,
    queries: Tensor,
    keys: Tensor,
    eps: float,
    log_density: ScalarFunction | None = None,
    quadrature: bool = False,
) -> float:
    """Largest difference between the attention step and the diffusion step.

    Args:
        manifold: Where the points lie.
        function: h.
        queries: Coordinates where to compare, (M, d).
        keys: Coordinates of the points, (N, d): drawn from p, or, with ``quadrature``, a regular
            grid whose points are weighted by p and the volume element.
        eps: Step size.
        log_density: log p up to a constant; uniform by default.
        quadrature: What ``keys`` are.
    """
    log_weights = None
    if quadrature:
        log_weights = manifold.volume(keys).log()
        if log_density is not None:
            log_weights = log_weights + torch.func.vmap(log_density)(keys)
    attended = attention_step(
        manifold.points(keys),
        torch.func.vmap(function)(keys),
        eps,
        manifold.points(queries),
        log_weights,
    )
    expected = diffusion_step(manifold, function, queries, eps, log_density)
    return (attended - expected).abs().max().item()
