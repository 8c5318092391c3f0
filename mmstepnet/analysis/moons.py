"""Two moons: how fast, how well and how reliably attention alone classifies sets of points.

The experiment of Ruan, Zhang: Towards understanding how attention mechanism works in deep
learning, 2024, https://arxiv.org/abs/2412.18288.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmstepnet.models.backbones.information_propagation_net import InformationPropagationNet


@dataclass(frozen=True)
class MoonsSettings:
    """Settings of one training.

    Args:
        kernel: ``'metric'``, ``'l2'`` or ``'dot'``.
        data: ``'moons'``, or ``'digits'``: scikit-learn's digits, each one point with 64
            coordinates, the test points from other writers.
        residual: Whether each attention layer adds to its input.
        depth: Attention layers.
        embed_dims: Width.
        steps: Optimiser steps, each over all training points.
        lr: Learning rate of Adam.
        train_points: Points to learn from.
        test_points: Points to test on.
        noise: Standard deviation of the points around the moons.
        data_seed: Seed of the points; None draws other points for every seed.
        eval_interval: Steps between two points of the curves.

    Raises:
        ValueError: Another ``data``, or a count below 1.
    """

    kernel: str = 'metric'
    data: str = 'moons'
    residual: bool = True
    depth: int = 2
    embed_dims: int = 16
    steps: int = 300
    lr: float = 0.01
    train_points: int = 400
    test_points: int = 100
    noise: float = 0.2
    data_seed: int | None = 0
    eval_interval: int = 5

    def __post_init__(self):
        if self.data not in ('moons', 'digits'):
            raise ValueError(f"data must be 'moons' or 'digits', got {self.data!r}")
        for name in (
            'depth',
            'embed_dims',
            'steps',
            'train_points',
            'test_points',
            'eval_interval',
        ):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)!r}')


def two_moons(points: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's two moons: coordinates (points, 2) in float32, classes (points,)."""
    from sklearn.datasets import make_moons

    coordinates, classes = make_moons(points, noise=noise, random_state=seed)
    return torch.from_numpy(coordinates).float(), torch.from_numpy(classes)


def digit_points(settings: MoonsSettings, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test points of the digits: coordinates (points, 64) in 0..1, and classes.

    The first 1,347 digits are for training, of which ``seed`` draws ``train_points``, and of the
    450 others it draws ``test_points``. ``noise`` is for the moons alone.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.from_numpy(bunch.data).float() / 16, torch.from_numpy(bunch.target)
    generator = torch.Generator().manual_seed(seed)
    train = torch.randperm(1347, generator=generator)[: settings.train_points]
    test = 1347 + torch.randperm(450, generator=generator)[: settings.test_points]
    return x[train], y[train], x[test], y[test]


def train_moons(settings: MoonsSettings, seed: int) -> tuple[InformationPropagationNet, dict]:
    """Train one network.

    The training points are one set, the test points another: at test time they see each other and
    none of the training points.

    Args:
        settings: What to train.
        seed: Of the network's start, and of the points if ``settings.data_seed`` is None.

    Returns:
        tuple[InformationPropagationNet, dict]: The network, and ``metrics`` (``accuracy`` of the
        last step on the test points and its ``best`` in %, ``accuracy_together`` of test points
        that see the training points too, ``loss`` and ``train_accuracy`` of the last step,
        ``steps_to_95``: the first step with a test accuracy of 95 % or more, one past the last if
        there was none) and ``curves`` (``step``, ``loss``, ``accuracy``).
    """
    data_seed = 2 * (seed if settings.data_seed is None else settings.data_seed)
    if settings.data == 'digits':
        x, y, test_x, test_y = digit_points(settings, data_seed)
    else:
        x, y = two_moons(settings.train_points, settings.noise, data_seed)
        test_x, test_y = two_moons(settings.test_points, settings.noise, data_seed + 1)

    torch.manual_seed(seed)
    net = InformationPropagationNet(
        in_dims=x.shape[1],
        out_dims=10 if settings.data == 'digits' else 2,
        embed_dims=settings.embed_dims,
        depth=settings.depth,
        kernel=settings.kernel,
        residual=settings.residual,
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr)
    curves = dict(step=[], loss=[], accuracy=[])
    for step in range(1, settings.steps + 1):
        logits = net(x[None])[0]
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % settings.eval_interval == 0 or step == settings.steps:
            curves['step'].append(step)
            curves['loss'].append(loss.item())
            curves['accuracy'].append(_accuracy(net, test_x, test_y))
    reached = [s for s, a in zip(curves['step'], curves['accuracy'], strict=True) if a >= 95]
    metrics = dict(
        accuracy=curves['accuracy'][-1],
        best=max(curves['accuracy']),
        accuracy_together=_accuracy(net, torch.cat([test_x, x]), test_y),
        loss=curves['loss'][-1],
        train_accuracy=_accuracy(net, x, y),
        steps_to_95=reached[0] if reached else settings.steps + 1,
    )
    return net, dict(metrics=metrics, curves=curves)


@torch.no_grad()
def _accuracy(net: InformationPropagationNet, x: Tensor, y: Tensor) -> float:
    """Accuracy in % on the first ``len(y)`` points of a set."""
    predicted = net(x[None])[0, : len(y)].argmax(-1)
    return 100 * (predicted == y).double().mean().item()
