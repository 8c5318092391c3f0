from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from mmstepnet.engine.hooks import PredictionPicturesHook

mmcv = pytest.importorskip('mmcv')


class Visualizer:
    """Keeps what it is told to draw."""

    def __init__(self):
        self.drawn = []

    def add_datasample(self, name, image, data_sample, pred_score_thr, step):
        self.drawn.append((name, image[0, 0].tolist(), data_sample, pred_score_thr, step))


@pytest.fixture
def runner():
    # No train_loop, epoch or iter: where there is no training, MMEngine's runner would build one.
    return SimpleNamespace(rank=0, _train_loop=None, visualizer=Visualizer())


def training(kind, done):
    """A loop that is so far."""
    loop = kind.__new__(kind)
    loop._epoch, loop._iter = done, 100 * done
    return loop


@pytest.fixture
def batches(tmp_path):
    """Two batches of two pictures; picture i is RGB (i, 0, 200)."""
    samples = []
    for i in range(4):
        path = tmp_path / f'p{i}.png'
        mmcv.imwrite(np.full((4, 5, 3), (200, 0, i), np.uint8), str(path))
        samples.append(SimpleNamespace(img_path=str(path)))
    return [samples[:2], samples[2:]]


def validate(hook, runner, batches):
    hook.before_val_epoch(runner)
    for index, outputs in enumerate(batches):
        hook.after_val_iter(runner, index, None, outputs)
    drawn, runner.visualizer.drawn = runner.visualizer.drawn, []
    return drawn


def test_draws_the_same_first_pictures_every_time(runner, batches):
    hook = PredictionPicturesHook(count=3, score_thr=0.4)
    expected = [(f'p{i}', [i, 0, 200], batches[i // 2][i % 2]) for i in range(3)]
    for epoch in (1, 2):
        runner._train_loop = training(EpochBasedTrainLoop, epoch)
        drawn = validate(hook, runner, batches)
        assert drawn == [(f'val_{n}', rgb, sample, 0.4, epoch) for n, rgb, sample in expected]


def test_counts_iterations_where_the_training_does(runner, batches):
    runner._train_loop = training(IterBasedTrainLoop, 7)
    assert {step for *_, step in validate(PredictionPicturesHook(), runner, batches)} == {700}


def test_without_a_training_nothing_is_counted(runner, batches):
    assert {step for *_, step in validate(PredictionPicturesHook(), runner, batches)} == {0}


def test_only_the_first_process_draws(runner, batches):
    runner.rank = 1
    assert validate(PredictionPicturesHook(), runner, batches) == []


@pytest.mark.parametrize(
    'arguments, message',
    (
        (dict(count=0), 'count must be a positive int, got 0'),
        (dict(count=True), 'count must be a positive int, got True'),
        (dict(score_thr=1.5), r'score_thr must be in \[0, 1\], got 1.5'),
    ),
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PredictionPicturesHook(**arguments)
