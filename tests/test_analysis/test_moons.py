import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from mmstepnet.analysis.moons import MoonsSettings, digit_points, train_moons, two_moons

TINY = dict(steps=20, train_points=60, test_points=30, eval_interval=10)


def test_same_seed_same_result_other_seed_other_network():
    _, first = train_moons(MoonsSettings(**TINY), seed=1)
    _, again = train_moons(MoonsSettings(**TINY), seed=1)
    _, other = train_moons(MoonsSettings(**TINY), seed=2)
    assert first == again
    assert first['metrics']['loss'] != other['metrics']['loss']
    assert first['curves']['step'] == [10, 20]


def test_metrics_are_those_of_the_network():
    settings = MoonsSettings(**TINY, kernel='l2', data_seed=None)
    net, result = train_moons(settings, seed=3)
    x, y = two_moons(60, 0.2, seed=6)
    test_x, test_y = two_moons(30, 0.2, seed=7)
    alone = net(test_x[None])[0].argmax(-1)
    together = net(torch.cat([test_x, x])[None])[0, :30].argmax(-1)
    accuracy = 100 * (alone == test_y).double().mean().item()
    assert result['metrics']['accuracy'] == accuracy
    expected = 100 * (together == test_y).double().mean().item()
    assert result['metrics']['accuracy_together'] == expected
    train = net(x[None])[0].argmax(-1)
    assert result['metrics']['train_accuracy'] == 100 * (train == y).double().mean().item()


def test_digits_are_points_of_other_writers():
    settings = MoonsSettings(data='digits', train_points=50, test_points=450, steps=5)
    x, y, test_x, test_y = digit_points(settings, seed=0)
    bunch = load_digits()
    order = [tuple(point) for point in (bunch.data / 16).tolist()]
    where = [order.index(tuple(point)) for point in x.tolist()]
    assert max(where) < 1347 and len(set(where)) == 50
    assert y.tolist() == bunch.target[where].tolist()
    assert sorted(map(tuple, test_x.tolist())) == sorted(order[1347:])
    assert torch.bincount(test_y).tolist() == np.bincount(bunch.target[1347:]).tolist()
    net, result = train_moons(settings, seed=1)
    assert net(test_x[None]).shape == (1, 450, 10)
    assert 0 <= result['metrics']['accuracy'] <= 100


def test_metric_attention_learns_the_moons():
    _, result = train_moons(MoonsSettings(steps=100), seed=0)
    assert result['metrics']['best'] >= 95
    assert result['metrics']['steps_to_95'] <= 100


@pytest.mark.parametrize(
    'settings', [dict(data='digit'), dict(steps=0), dict(eval_interval=0), dict(depth=0)]
)
def test_settings_that_train_nothing(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f'{name} must be .*{value!r}'):
        MoonsSettings(**settings)
