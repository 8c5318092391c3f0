import json

import numpy as np
import pytest

from mmstepnet.utils.training_logs import (
    best_is,
    best_value,
    group_by_settings,
    mean_over_runs,
    read_training_log,
)


def write_start(work_dir, start, lines, config=None, cut=''):
    """One start of a training, as MMEngine leaves it."""
    folder = work_dir / start / 'vis_data'
    folder.mkdir(parents=True)
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / 'scalars.json').write_text(text + cut)
    if config is not None:
        (folder / 'config.py').write_text(config)


def trained(iteration, loss, epoch, time=0.5, data_time=0.1):
    line = dict(loss=loss, time=time, data_time=data_time, epoch=epoch)
    return dict(line, iter=iteration, step=iteration)


def evaluated(epoch, score):
    return {'coco/bbox_mAP': score, 'time': 9.0, 'data_time': 1.0, 'step': epoch}


@pytest.fixture
def run(tmp_path):
    # Four iterations an epoch, a line every second. Killed in epoch 3, resumed from epoch 1.
    first = [
        *(trained(2, 5.0, 1), trained(4, 4.0, 1), evaluated(1, 0.1)),
        *(trained(6, 3.0, 2), trained(8, 2.0, 2), evaluated(2, 0.2)),
        trained(10, 1.0, 3),
    ]
    second = [trained(6, 3.5, 2), trained(8, 2.5, 2), evaluated(2, 0.25)]
    write_start(tmp_path / 'run', '20260101_000000', first, cut='{"loss": 0.9, "ti')
    write_start(tmp_path / 'run', '20260101_010000', second)
    return tmp_path / 'run'


def test_later_start_counts(run):
    log = read_training_log(run)
    assert [(line['iter'], line['loss']) for line in log.training] == [
        *((2, 5.0), (4, 4.0), (6, 3.5), (8, 2.5)),
    ]
    assert [line['coco/bbox_mAP'] for line in log.evaluations] == [0.1, 0.25]
    assert log.iterations_per_epoch == 4
    assert log.quantities == ['loss', 'time', 'data_time', 'coco/bbox_mAP']


def test_start_from_the_beginning_forgets_everything(run):
    write_start(run, '20260101_020000', [trained(2, 9.0, 1)])
    log = read_training_log(run)
    assert [line['loss'] for line in log.training] == [9.0]
    assert log.evaluations == []


def test_curves_by_epoch_and_by_iteration(run):
    log = read_training_log(run)
    for key, epochs, values in (
        ('loss', [0.5, 1, 1.5, 2], [5, 4, 3.5, 2.5]),
        ('coco/bbox_mAP', [1, 2], [0.1, 0.25]),
        ('unknown', [], []),
    ):
        for by_epoch, scale in ((True, 1), (False, 4)):
            x, y = log.curve(key, by_epoch)
            np.testing.assert_array_equal(x, np.array(epochs) * scale)
            np.testing.assert_array_equal(y, values)


def test_interval_that_does_not_divide_an_epoch(tmp_path):
    # 7 iterations an epoch, a line after the 3rd and the 6th of each.
    lines = [trained(7 * e + i, 1.0, e + 1) for e in range(3) for i in (3, 6)]
    write_start(tmp_path, 'a', lines)
    assert read_training_log(tmp_path).iterations_per_epoch == 7


def test_training_that_counts_iterations(tmp_path):
    lines = [dict(loss=1.0, iter=10, step=10), {'coco/bbox_mAP': 0.5, 'step': 10}]
    write_start(tmp_path, 'a', lines)
    log = read_training_log(tmp_path)
    assert log.iterations_per_epoch is None
    assert log.curve('coco/bbox_mAP', by_epoch=False)[0].tolist() == [10]
    assert log.timing == {}
    with pytest.raises(ValueError, match='does not count epochs'):
        log.curve('loss', by_epoch=True)


def test_times_weigh_lines_by_their_iterations(tmp_path):
    # 3 iterations of 1 s, 1 of 3 s, 2 of 2 s; of it 0.3, 1.5 and 0.2 s waiting.
    lines = [
        *(trained(3, 1.0, 1, 1.0, 0.1), trained(4, 1.0, 1, 3.0, 1.5)),
        *(evaluated(1, 0.1), trained(6, 1.0, 2, 2.0, 0.1)),
    ]
    write_start(tmp_path, 'a', lines)
    timing = read_training_log(tmp_path).timing
    assert timing == pytest.approx(
        dict(mean=10 / 6, median=2.0, total=10.0, data_share=0.2, epoch=3 * 10 / 6)
    )


@pytest.mark.parametrize('content', (None, '', '{"loss": 1'))
def test_folder_without_a_log(tmp_path, content):
    if content is not None:
        write_start(tmp_path, 'a', [], cut=content)
    with pytest.raises(ValueError, match='has no log'):
        read_training_log(tmp_path)


CONFIG = """
model = dict(type='Net', parts=[dict(width={width})])
randomness = dict(seed={seed})
work_dir = {seed!r}
load_from = {load_from!r}
resume = {resume}
"""


def config(width=8, seed=0, load_from=None, resume=False):
    return CONFIG.format(width=width, seed=seed, load_from=load_from, resume=resume)


def make_run(folder, config_name, text):
    write_start(folder, '20260101_000000', [trained(2, 1.0, 1)], config=text)
    if text is not None:
        (folder / f'{config_name}.py').write_text(text)
    return read_training_log(folder)


def test_seeds_of_one_setting_are_a_group(tmp_path):
    logs = [
        make_run(tmp_path / 'a', 'net', config(seed=0)),
        make_run(tmp_path / 'b', 'other', config(seed=0)),
        make_run(tmp_path / 'c', 'net', config(seed=1, load_from='x.pth', resume=True)),
        make_run(tmp_path / 'd', 'net', config(seed=2, width=16)),
    ]
    assert [log.seed for log in logs] == [0, 0, 1, 2]
    groups = group_by_settings(logs)
    assert groups == {
        'net width=8': [logs[0], logs[2]],
        'other': [logs[1]],
        'net width=16': [logs[3]],
    }


def test_what_can_not_be_told_apart_stands_alone(tmp_path):
    logs = [
        make_run(tmp_path / 'a', 'net', config(seed=0)),
        make_run(tmp_path / 'b', 'net', config(seed=0)),
        make_run(tmp_path / 'c', None, None),
    ]
    assert group_by_settings(logs) == {
        f'net ({tmp_path / "a"})': [logs[0]],
        f'net ({tmp_path / "b"})': [logs[1]],
        'c': [logs[2]],
    }


def test_config_that_was_cut_short(tmp_path):
    with pytest.raises(ValueError, match=r'config\.py is no config that can be read'):
        make_run(tmp_path, 'net', 'model = dict(')


@pytest.mark.parametrize(
    'key, best, value',
    (
        *(('loss', 'smallest', 1.0), ('loss_rpn_cls', 'smallest', 1.0)),
        *(('coco/bbox_mAP', 'largest', 3.0), ('accuracy/top1', 'largest', 3.0)),
        *(('stiffness/tns', None, None), ('lr', None, None), ('data_time', None, None)),
    ),
)
def test_best_value(key, best, value):
    assert best_is(key) == best
    if best is not None:
        assert best_value(np.array([2.0, 1.0, np.nan, 3.0]), key) == value


def test_mean_over_the_runs_that_came_so_far():
    x, mean, deviation = mean_over_runs(
        [
            (np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 5.0])),
            (np.array([1.0, 2.0]), np.array([3.0, 2.0])),
            (np.array([]), np.array([])),
        ]
    )
    assert x.tolist() == [1, 2, 3]
    assert mean.tolist() == [2, 2, 5]
    np.testing.assert_allclose(deviation, [2**0.5, 0, np.nan])
