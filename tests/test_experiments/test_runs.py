import errno
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmstepnet.experiments.runs import (
    ROOT,
    Run,
    RunError,
    _children,
    complete,
    epoch_losses,
    finished,
    last_and_best,
    read_result,
    runs_table,
    seconds_logged,
    train,
    train_command,
    write_result,
)
from mmstepnet.utils.training_logs import read_log

TRAIN_COMMAND = 'mmstepnet.experiments.runs.train_command'


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
        complete(runs, execute, quiet)
    assert len(finished(runs)) == 2
    results = complete(runs, execute, quiet)
    assert executed == [('a', 0), ('a', 1), ('b', 0), ('b', 0), ('b', 1)]
    assert [r['metrics']['accuracy'] for r in results] == [0, 10, 0, 10]
    assert complete(runs, None, quiet) == results


def test_a_result_of_other_settings_is_refused(tmp_path):
    complete(runs_of(tmp_path, lr=0.1), lambda run: dict(metrics={}), quiet)
    with pytest.raises(RunError, match='options differ'):
        finished(runs_of(tmp_path, lr=0.2))


@pytest.mark.parametrize(
    'content',
    [
        *(b'', b'{"format": ', b'{"format": "other/1"}', b'{"format": "mmstepnet.run/1"}'),
        *(b'null', b'[]', b'\xff\xfe'),
    ],
)
def test_an_unreadable_result_is_named(tmp_path, content):
    run = runs_of(tmp_path)[0]
    run.work_dir.mkdir(parents=True)
    (run.work_dir / 'result.json').write_bytes(content)
    with pytest.raises(RunError, match=r'result\.json .* delete it'):
        read_result(run)


def test_commands(tmp_path):
    run = Run('a', 'digits', 3, tmp_path, 'c.py', {'train_cfg.max_epochs': 2, 'x': [1, 2]})
    single = train_command(run)
    assert single[0] == sys.executable
    config = str(ROOT / 'c.py')
    assert single[2:] == [
        config, '--work-dir', str(tmp_path / 'digits/a/seed3'), '--resume', '--cfg-options',
        'train_cfg.max_epochs=2', 'x=[1,2]', 'randomness.seed=3',
    ]  # fmt: skip
    several = train_command(run, gpus=8)
    assert several[0] == 'bash' and several[2:4] == [config, '8']
    assert several[4:] == single[3:]


def test_a_failed_training_shows_the_end_of_its_log(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    code = 'print("the reason"); raise SystemExit(3)'
    monkeypatch.setattr(TRAIN_COMMAND, lambda *_: [sys.executable, '-c', code])
    with pytest.raises(RunError, match=r'exit code 3[\s\S]*the reason'):
        train(run)


def test_the_end_of_a_log_is_shown_whatever_it_holds(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    code = r'import sys; sys.stdout.buffer.write(b"half \xe2 a character\n"); raise SystemExit(3)'
    monkeypatch.setattr(TRAIN_COMMAND, lambda *_: [sys.executable, '-c', code])
    with pytest.raises(RunError, match=r'half . a character'):
        train(run)


def test_a_launcher_of_the_shell_is_not_that_of_a_run(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    for name in ('PORT', 'NNODES', 'NODE_RANK', 'MASTER_ADDR'):
        monkeypatch.setenv(name, '8080')
    code = 'import os; print(sorted(k for k, v in os.environ.items() if v == "8080")); 1 / 0'
    monkeypatch.setattr(TRAIN_COMMAND, lambda *_: [sys.executable, '-c', code])
    with pytest.raises(RunError, match=r'\n\[\]\n'):
        train(run)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, 'Function not implemented')

    monkeypatch.setattr('fcntl.flock', no_locks)
    with pytest.raises(RunError, match=r'\.lock can not be locked .*choose a --work-dir'):
        train(Run('a', 'digits', 0, tmp_path, 'c.py'))


def test_a_training_outlives_a_killed_runner_under_its_lock(tmp_path, monkeypatch):
    run = Run('a', 'digits', 0, tmp_path, 'c.py')
    ready = tmp_path / 'ready'
    code = f'import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)'
    monkeypatch.setattr(TRAIN_COMMAND, lambda *_: [sys.executable, '-c', code])
    pool = ThreadPoolExecutor(1)
    future = pool.submit(train, run)
    while not ready.exists():
        assert not future.done(), future.exception()
        time.sleep(0.01)
    with pytest.raises(RunError, match='another process'):
        train(run)
    (child,) = _children
    child.terminate()
    with pytest.raises(RunError, match='exit code -15'):
        future.result(timeout=30)
    assert not _children


def test_several_workers_do_each_run_once_and_stop_at_a_failure(tmp_path):
    both = threading.Barrier(2)

    def execute(run):
        both.wait(timeout=30)
        return dict(metrics=dict(x=run.seed))

    results = complete(runs_of(tmp_path / 'good'), execute, quiet, workers=2)
    assert [r['metrics']['x'] for r in results] == [0, 1, 0, 1]

    def fail(run):
        raise RunError(f'no {run.row}')

    with pytest.raises(RunError, match='no '):
        complete(runs_of(tmp_path / 'bad'), fail, quiet, workers=2)


def test_a_failure_ends_what_another_worker_is_about_to_start(tmp_path, monkeypatch):
    marker = tmp_path / 'trained'
    code = f'import pathlib, time; time.sleep(60); pathlib.Path({str(marker)!r}).touch()'
    monkeypatch.setattr(TRAIN_COMMAND, lambda *_: [sys.executable, '-c', code])
    both = threading.Barrier(2)

    def execute(run):
        both.wait(timeout=30)
        if run.seed == 0:
            raise RunError('broken')
        time.sleep(0.3)
        return dict(metrics=train(run))

    with pytest.raises(RunError, match='broken'):
        complete(runs_of(tmp_path)[:2], execute, quiet, workers=2)
    assert not marker.exists()


def test_losses_and_metrics_of_a_resumed_training(tmp_path):
    def log(start, *lines):
        folder = tmp_path / start / 'vis_data'
        folder.mkdir(parents=True)
        text = ''.join(json.dumps(line) + '\n' for line in lines)
        (folder / 'scalars.json').write_text(text)

    log(
        '1',
        dict(loss=1.0, epoch=1, iter=5),
        dict(top1=50.0, step=1),
        dict(loss=0.8, epoch=2, iter=8),
        dict(top1=61.0, step=2),
    )
    log(
        '2',
        dict(loss=0.7, epoch=2, iter=8),
        dict(top1=60.0, step=2),
        dict(loss=0.5, epoch=3, iter=9),
        dict(top1=55.0, step=3),
    )
    assert epoch_losses(tmp_path) == [1.0, 0.7, 0.5]
    _, found = read_log(tmp_path)
    assert last_and_best(found, 'top1') == dict(last=55, best=60)
    with pytest.raises(RunError, match='top1'):
        last_and_best(found, 'top5')


def test_the_table_of_runs_has_every_metric_unrounded(tmp_path):
    metrics = {'a': dict(last=1 / 3), 'b': dict(last=50.0, tns=0.25)}
    for run in runs_of(tmp_path):
        write_result(run, metrics=metrics[run.row], seconds=1.5)
    table = runs_table(finished(runs_of(tmp_path)))
    assert table.csv().splitlines() == [
        'column,row,seed,last,tns,seconds',
        'data,a,0,0.3333333333333333,,1.5',
        'data,a,1,0.3333333333333333,,1.5',
        'data,b,0,50.0,0.25,1.5',
        'data,b,1,50.0,0.25,1.5',
    ]


def test_a_run_that_another_command_finishes_meanwhile_is_not_repeated(tmp_path):
    first, second, *_ = runs_of(tmp_path)
    executed = []

    def execute(run):
        executed.append(run)
        write_result(second, seconds=3600.0, metrics={})
        return dict(metrics={})

    results = complete([first, second], execute, quiet)
    assert executed == [first]
    assert results[1]['seconds'] == 3600.0


def test_runs_without_a_training_are_locked_too(tmp_path):
    run = runs_of(tmp_path)[0]

    def execute(_):
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(complete, [run], lambda run: dict(metrics={}), quiet)
            with pytest.raises(RunError, match='another process'):
                again.result(timeout=30)
        return dict(metrics=dict(done=1))

    assert complete([run], execute, quiet)[0]['metrics'] == dict(done=1)


def test_seconds_of_all_starts(tmp_path):
    assert seconds_logged(tmp_path) == 0
    for start in (1_700_000_000, 1_700_009_000):
        name = time.strftime('%Y%m%d_%H%M%S', time.localtime(start))
        file = tmp_path / name / 'vis_data' / 'scalars.json'
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (start + 60, start + 60))
    assert seconds_logged(tmp_path) == 120
    run = runs_of(tmp_path)[0]
    results = complete([run], lambda run: dict(metrics={}, seconds=seconds_logged(tmp_path)), quiet)
    assert results[0]['seconds'] == 120


def test_a_run_of_several_processes_uses_the_same_python(tmp_path, monkeypatch):
    for name, word, code in (('python', 'wrong', 7), ('own', 'right', 3)):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho {word}; exit {code}\n')
        script.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'own'))
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.delenv('PYTHON', raising=False)
    with pytest.raises(RunError, match=r'exit code 3[\s\S]*right'):
        train(Run('a', 'd', 0, tmp_path / 'out', 'c.py'), gpus=2)
