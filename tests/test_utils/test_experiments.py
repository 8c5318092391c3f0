import json
import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmstepnet.utils import experiments
from mmstepnet.utils.experiments import Run, RunError, Table


def runs_of(root, **options):
    return [Run(row, 'data', seed, root, options=options) for row in 'ab' for seed in range(2)]


def quiet(_):
    pass


def test_finished_runs_are_not_repeated_and_failed_ones_are(tmp_path):
    executed = []

    def execute(run):
        executed.append((run.row, run.seed))
        if executed.count(('b', 0)) == 1 and run.row == 'b':
            raise RunError('killed')
        return dict(metrics=dict(accuracy=10 * run.seed))

    runs = runs_of(tmp_path)
    with pytest.raises(RunError, match='killed'):
        experiments.complete(runs, execute, quiet)
    assert len(experiments.finished(runs)) == 2
    results = experiments.complete(runs, execute, quiet)
    assert executed == [('a', 0), ('a', 1), ('b', 0), ('b', 0), ('b', 1)]
    assert [r['metrics']['accuracy'] for r in results] == [0, 10, 0, 10]
    assert experiments.complete(runs, None, quiet) == results


def test_a_result_of_other_settings_is_refused(tmp_path):
    experiments.complete(runs_of(tmp_path, lr=0.1), lambda run: dict(metrics={}), quiet)
    with pytest.raises(RunError, match='options differ'):
        experiments.finished(runs_of(tmp_path, lr=0.2))


@pytest.mark.parametrize('content', ['{"format": ', '{"format": "other/1"}'])
def test_an_unreadable_result_is_named(tmp_path, content):
    run = runs_of(tmp_path)[0]
    run.work_dir.mkdir(parents=True)
    (run.work_dir / 'result.json').write_text(content)
    with pytest.raises(RunError, match=r'result\.json'):
        experiments.read_result(run)


def test_commands(tmp_path):
    run = Run('a', 'digits', 3, tmp_path, 'c.py', {'train_cfg.max_epochs': 2, 'x': [1, 2]})
    single = experiments.train_command(run)
    assert single[0] == sys.executable
    config = str(experiments.ROOT / 'c.py')
    assert single[2:] == [
        config, '--work-dir', str(tmp_path / 'digits/a/seed3'), '--resume', '--cfg-options',
        'train_cfg.max_epochs=2', 'x=[1,2]', 'randomness.seed=3',
    ]  # fmt: skip
    several = experiments.train_command(run, gpus=8)
    assert several[0] == 'bash' and several[2:4] == [config, '8']
    assert several[4:] == single[3:]


def test_a_failed_training_shows_the_end_of_its_log(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    code = 'print("the reason"); raise SystemExit(3)'
    monkeypatch.setattr(experiments, 'train_command', lambda *_: [sys.executable, '-c', code])
    with pytest.raises(RunError, match=r'exit code 3[\s\S]*the reason'):
        experiments.train(run)


def test_a_training_outlives_a_killed_runner_under_its_lock(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    ready = tmp_path / 'ready'
    code = f'import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)'
    monkeypatch.setattr(experiments, 'train_command', lambda *_: [sys.executable, '-c', code])
    pool = ThreadPoolExecutor(1)
    future = pool.submit(experiments.train, run)
    while not ready.exists():
        time.sleep(0.01)
    with pytest.raises(RunError, match='another process'):
        experiments.train(run)
    (child,) = experiments._children
    child.terminate()
    with pytest.raises(RunError, match='exit code -15'):
        future.result(timeout=30)
    assert not experiments._children


def test_several_workers_do_each_run_once_and_stop_at_a_failure(tmp_path):
    both = threading.Barrier(2)

    def execute(run):
        both.wait(timeout=30)
        return dict(metrics=dict(x=run.seed))

    results = experiments.complete(runs_of(tmp_path / 'good'), execute, quiet, workers=2)
    assert [r['metrics']['x'] for r in results] == [0, 1, 0, 1]

    def fail(run):
        raise RunError(f'no {run.row}')

    with pytest.raises(RunError, match='no '):
        experiments.complete(runs_of(tmp_path / 'bad'), fail, quiet, workers=2)


def test_a_failure_ends_what_another_worker_is_about_to_start(tmp_path, monkeypatch):
    marker = tmp_path / 'trained'
    command = ['sh', '-c', f'sleep 3; touch {marker}']
    monkeypatch.setattr(experiments, 'train_command', lambda *_: command)
    both = threading.Barrier(2)

    def execute(run):
        both.wait(timeout=30)
        if run.seed == 0:
            raise RunError('broken')
        time.sleep(0.3)
        return dict(metrics=experiments.train(run))

    with pytest.raises(RunError, match='broken'):
        experiments.complete(runs_of(tmp_path)[:2], execute, quiet, workers=2)
    assert not marker.exists()


def test_evaluations_of_a_resumed_training(tmp_path):
    def log(start, *lines, end=''):
        folder = tmp_path / start / 'vis_data'
        folder.mkdir(parents=True)
        text = '\n'.join(json.dumps(line) for line in lines) + '\n' + end
        (folder / 'scalars.json').write_text(text)

    log(
        '1',
        dict(loss=1.0, epoch=1, step=5),
        dict(loss=0.8, epoch=2, step=8),
        dict(top1=50.0, step=1),
        dict(top1=61.0, step=2),
        end='{"to',
    )
    log(
        '2',
        dict(loss=0.7, epoch=2, step=8),
        dict(loss=0.5, epoch=3, step=9),
        dict(top1=60.0, step=2),
        dict(top1=55.0, step=3),
    )
    found = experiments.evaluations(tmp_path)
    assert [line['top1'] for line in found] == [50, 60, 55]
    assert experiments.epoch_losses(tmp_path) == [1.0, 0.7, 0.5]
    assert experiments.last_and_best(found, 'top1') == dict(last=55, best=60)
    with pytest.raises(RunError, match='top1'):
        experiments.last_and_best(found, 'top5')


def test_spread():
    mean, std = experiments.mean_and_std([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert std == pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2))
    assert experiments.spread([1.0, 2.0, 4.0]) == '2.33 ± 1.53'
    assert experiments.spread([2.0], 1) == '2.0'
    assert experiments.spread([]) == '-'


def test_table(tmp_path):
    table = Table(['name', 'x'], [['a, b', '1'], ['c', '22']])
    assert table.text() == 'name  x\na, b  1\nc     22'
    assert table.markdown() == '| name | x |\n| --- | --- |\n| a, b | 1 |\n| c | 22 |'
    assert table.csv() == 'name,x\n"a, b",1\nc,22'
    files = table.write(tmp_path / 'out' / 'table')
    assert [f.name for f in files] == ['table.txt', 'table.md', 'table.csv']
    assert files[1].read_text() == table.markdown() + '\n'
