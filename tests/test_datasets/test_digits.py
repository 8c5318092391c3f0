import numpy as np
import pytest
from sklearn.datasets import load_digits

from mmstepnet.datasets import Digits


def stack(dataset):
    pictures = np.stack([dataset[i]['img'][..., 0] for i in range(len(dataset))])
    return pictures, np.array([dataset[i]['gt_label'] for i in range(len(dataset))])


def test_splits_are_the_digits_of_scikit_learn_in_order():
    bunch = load_digits()
    parts = [stack(Digits(split=split)) for split in ('train', 'test')]
    assert [len(labels) for _, labels in parts] == [1347, 450]
    assert np.array_equal(np.concatenate([labels for _, labels in parts]), bunch.target)
    expected = np.round(bunch.images * 255 / 16)
    assert np.array_equal(np.concatenate([pictures for pictures, _ in parts]), expected)
    assert parts[0][0].dtype == np.uint8


def test_train_per_class_draws_from_the_training_digits():
    pictures, labels = stack(Digits(train_per_class=7))
    assert np.array_equal(np.bincount(labels), [7] * 10)
    known = {p.tobytes() for p in stack(Digits())[0]}
    assert all(p.tobytes() in known for p in pictures)
    again, other = stack(Digits(train_per_class=7)), stack(Digits(train_per_class=7, seed=1))
    assert np.array_equal(pictures, again[0])
    assert not np.array_equal(pictures, other[0])
    assert len(Digits(split='test', train_per_class=7)) == 450


def test_noise_has_the_given_spread_and_is_the_same_every_time():
    clean, noisy = stack(Digits())[0], stack(Digits(noise=0.1))[0]
    assert np.array_equal(noisy, stack(Digits(noise=0.1))[0])
    # In the middle of the range nothing is clipped.
    middle = (clean > 100) & (clean < 155)
    difference = (noisy.astype(float) - clean)[middle] / 255
    assert difference.std() == pytest.approx(0.1, rel=0.05)
    assert difference.mean() == pytest.approx(0, abs=0.01)
    test = stack(Digits(split='test', noise=0.1))[0].astype(float) - stack(Digits(split='test'))[0]
    assert not np.array_equal(test, (noisy.astype(float) - clean)[:450])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(split='val'), "split='val'"),
        (dict(noise=-0.1), 'noise=-0.1'),
        (dict(train_per_class=0), 'train_per_class=0'),
        (dict(train_per_class=500), 'train_per_class=500'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Digits(**arguments)
