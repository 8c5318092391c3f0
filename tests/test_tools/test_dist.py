import contextlib
import gc
import os
import random
import signal
import socket
import sys
import time

import psutil
import pytest
import torch

import mmstepnet  # noqa: F401  (lets the safe loader read MMEngine's checkpoints)


@pytest.fixture
def launch(load_tool, monkeypatch):
    for name in ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT'):
        monkeypatch.delenv(name, raising=False)
    return load_tool('launch')


@pytest.mark.parametrize(
    ('gpus', 'env', 'message'),
    [
        ('two', {}, "GPUS must be a whole number of at least 1, got 'two'"),
        ('0', {}, "GPUS must be a whole number of at least 1, got '0'"),
        ('1', {'NNODES': 'x'}, "NNODES must be a whole number of at least 1, got 'x'"),
        ('1', {'NODE_RANK': '1'}, 'NODE_RANK must be below NNODES (1), got 1'),
        ('1', {'PORT': '70000'}, 'PORT must be below 65536, got 70000'),
    ],
)
def test_bad_numbers(launch, monkeypatch, capsys, gpus, env, message):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, 'argv', ['launch.py', gpus, 'script.py'])
    with pytest.raises(SystemExit) as exit_info:
        launch.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f'error: {message}\n'


def test_more_gpus_than_there_are(launch, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    monkeypatch.setattr(sys, 'argv', ['launch.py', '8', 'script.py'])
    with pytest.raises(SystemExit):
        launch.main()
    assert capsys.readouterr().err == 'error: GPUS is 8, but this machine has 4\n'


def test_port_taken_and_port_free(launch, monkeypatch, capsys, free_port):
    with socket.socket() as listener:
        listener.bind(('', 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setenv('PORT', str(taken))
        with pytest.raises(SystemExit):
            launch.port_for(nnodes=1, node_rank=0)
        assert f'error: PORT {taken} can not be used: Address already in use' in (
            capsys.readouterr().err
        )
        # The other nodes only connect to it.
        assert launch.port_for(nnodes=2, node_rank=1) == taken
    monkeypatch.setenv('PORT', str(free_port))
    assert launch.port_for(nnodes=1, node_rank=0) == free_port
    monkeypatch.delenv('PORT')
    assert launch.port_for(nnodes=2, node_rank=1) == 29500


def test_shell_scripts_without_arguments(toy):
    for script in ('dist_train.sh', 'dist_test.sh'):
        code, output = toy.run(script, toy.config)
        assert code == 2
        assert output.startswith('usage: ')


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


def start_endless(toy, work_dir):
    """A two-process run that has written a checkpoint and goes on, and its processes."""
    process = toy.start(
        'dist_train.sh',
        *(toy.config, 2, '--work-dir', work_dir, '--cfg-options'),
        *('train_cfg.max_epochs=100000', 'default_hooks.checkpoint.max_keep_ckpts=2'),
    )
    wait_for(lambda: list(work_dir.glob('epoch_*.pth')) or process.poll() is not None, 120)
    assert process.poll() is None
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('victim', 'number', 'code', 'message'),
    [
        ('worker', signal.SIGKILL, 137, 'was ended by SIGKILL; all others were stopped'),
        ('all', signal.SIGINT, 130, 'SIGINT: all processes were stopped'),
        ('launcher', signal.SIGTERM, 143, 'SIGTERM: all processes were stopped'),
        ('launcher', signal.SIGKILL, -9, ''),
    ],
)
def test_signals_leave_no_process(toy, assert_ended, tmp_path, victim, number, code, message):
    process, started = start_endless(toy, tmp_path / 'run')
    worker = psutil.Process(process.pid).children()[0]
    # Ctrl-C on a terminal reaches every process of the group.
    targets = {'worker': [worker], 'launcher': [process], 'all': [process, *started]}
    for target in targets[victim]:
        with contextlib.suppress(psutil.NoSuchProcess):
            target.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert message in output
    assert 'KeyboardInterrupt' not in output
    assert_ended(started)
    # Data loaders' processes start anew every epoch.
    commands = [' '.join(p.info['cmdline'] or ()) for p in psutil.process_iter(['cmdline'])]
    assert not [command for command in commands if str(tmp_path / 'run') in command]


@pytest.mark.slow
def test_ten_kills_change_nothing(toy, assert_ended, tmp_path):
    """A rank, or launcher and ranks, killed at a random moment, then resumed."""
    options = ('--cfg-options', 'train_cfg.max_epochs=120', 'randomness.seed=5')
    options += ('default_hooks.checkpoint.max_keep_ckpts=2', 'default_hooks.logger.interval=50')
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    code, output = toy.run('dist_train.sh', toy.config, 2, '--work-dir', whole, *options)
    assert code == 0, output

    first, second = sorted(whole.glob('epoch_*.pth'), key=lambda p: p.stat().st_mtime)
    epoch = second.stat().st_mtime - first.stat().st_mtime
    moments = random.Random(0)
    kills = 0
    while kills < 10:
        before = newest_epoch(killed)
        arguments = (toy.config, 2, '--work-dir', killed, '--resume', *options)
        process = toy.start('dist_train.sh', *arguments)
        wait_for(lambda: newest_epoch(killed) > before or process.poll() is not None, 200)  # noqa: B023
        time.sleep(moments.uniform(0, 2 * epoch))
        launcher = psutil.Process(process.pid)
        ranks, started = launcher.children(), launcher.children(recursive=True)
        assert process.poll() is None, 'the run was through before it could be killed'
        # The launcher first, or it would end the others before they are killed.
        for victim in [launcher, *started] if kills % 2 else [moments.choice(ranks)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.communicate(timeout=60)
        assert_ended(started)
        kills += 1
    assert newest_epoch(killed) < 120
    code, output = toy.run('dist_train.sh', *arguments)
    assert code == 0, output
    expected, found = (torch.load(folder / 'epoch_120.pth') for folder in (whole, killed))
    for key, value in expected['state_dict'].items():
        assert torch.equal(value, found['state_dict'][key]), key


def newest_epoch(work_dir):
    return max((int(p.stem.split('_')[1]) for p in work_dir.glob('epoch_*.pth')), default=0)


@pytest.mark.slow
@pytest.mark.smoke
def test_two_processes_resume_test_and_two_nodes(toy, tmp_path, free_port):
    """Train; the same broken off and resumed; the same on two "nodes"; test on one and on two."""
    seed = ('--cfg-options', 'randomness.seed=5', 'train_cfg.max_epochs=3')
    whole, broken, nodes = (tmp_path / name for name in ('whole run', 'broken run', 'nodes'))
    code, output = toy.run('dist_train.sh', toy.config, 2, '--work-dir', whole, *seed)
    assert code == 0, output

    broken.mkdir()
    (broken / 'epoch_1.pth').write_bytes((whole / 'epoch_1.pth').read_bytes())
    code, output = toy.run('dist_train.sh', toy.config, 2, '--work-dir', broken, '--resume', *seed)
    assert code == 0, output

    launchers = [
        toy.start(
            *('dist_train.sh', toy.config, 1, '--work-dir', nodes, *seed),
            NNODES='2',
            NODE_RANK=str(rank),
            PORT=str(free_port),
        )
        for rank in range(2)
    ]
    outputs = [launcher.communicate(timeout=200)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs

    expected = torch.load(whole / 'epoch_3.pth')
    assert expected['meta']['world_size'] == 2
    for folder in (broken, nodes):
        found = torch.load(folder / 'epoch_3.pth')['state_dict']
        for key, value in expected['state_dict'].items():
            assert torch.equal(value, found[key]), (folder, key)

    code, output = toy.run(
        *('dist_test.sh', toy.config, whole / 'epoch_3.pth', 2, '--work-dir', tmp_path / 'test'),
        *('--out', tmp_path / 'metrics.json', '--out-item', 'metrics'),
    )
    assert code == 0, output
    assert 'accuracy' in (tmp_path / 'metrics.json').read_text()


@pytest.mark.smoke
def test_no_wrapped_model_outlives_its_group(toy, tmp_path, monkeypatch, free_port):
    """It would keep gloo's threads until the interpreter's exit, which can abort the process."""
    alive = []
    destroy = torch.distributed.destroy_process_group

    def count_and_destroy():
        wrapped = torch.nn.parallel.DistributedDataParallel
        alive.append(sum(isinstance(thing, wrapped) for thing in gc.get_objects()))
        destroy()

    monkeypatch.setattr(torch.distributed, 'destroy_process_group', count_and_destroy)
    settings = dict(
        RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    options = ('--launcher', 'pytorch', '--local-rank', 0, '--work-dir', tmp_path, '--cfg-options')
    toy.call(monkeypatch, 'train', *options, 'train_cfg.max_epochs=1')
    toy.call(monkeypatch, 'test', tmp_path / 'epoch_1.pth', *options)
    assert alive == [0, 0]


@pytest.mark.slow
def test_a_process_that_hangs_is_named(toy, tmp_path):
    code, output = toy.run(
        *('dist_train.sh', toy.config, 2, '--work-dir', tmp_path / 'run', '--cfg-options'),
        *('train_dataloader.dataset.hanging_rank=1', 'env_cfg.dist_cfg.timeout=30'),
    )
    assert code == 1
    assert 'error: process 1 hangs: the others waited 30 s for it' in output
    assert 'Traceback' not in output


@pytest.mark.slow
def test_nodes_that_do_not_meet(toy, launch, monkeypatch, capsys, free_port):
    for name, value in (('NNODES', '2'), ('PORT', str(free_port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, 'NODES_SECONDS', 5)
    monkeypatch.setattr(sys, 'argv', ['launch.py', '1', 'script.py'])
    monkeypatch.setattr(launch.logging, 'disable', lambda level: None)
    with pytest.raises(SystemExit):
        launch.main()
    assert (
        f'the 2 nodes have not met at 127.0.0.1:{free_port} within 5 s' in capsys.readouterr().err
    )
    assert launch._LAUNCHER_PID not in os.environ


@pytest.mark.slow
def test_bad_input_is_said_once_and_leaves_nothing(toy, tmp_path):
    temporary = tmp_path / 'temporary'
    temporary.mkdir()
    code, output = toy.run('dist_train.sh', tmp_path / 'no config.py', 2, TMPDIR=str(temporary))
    assert code == 2
    assert output.strip() == f'error: config {tmp_path}/no config.py does not exist'
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_too_many_processes_for_one_batch(toy, tmp_path):
    options = ('--cfg-options', 'train_dataloader.batch_size=8', 'train_dataloader.drop_last=True')
    code, output = toy.run('dist_train.sh', toy.config, 2, '--work-dir', tmp_path, *options)
    assert code == 2
    assert output.count('error: ') == 1
    assert 'has no batch: 12 samples, 2 processes x batch size 8, and drop_last=True' in output
    assert not list(tmp_path.glob('*.pth'))


@pytest.mark.parametrize(
    'script', ['quickstart', 'dist_train', 'dist_test', 'slurm_train', 'slurm_test']
)
def test_scripts_say_their_usage_instead_of_starting(toy, script):
    code, output = toy.run(f'{script}.sh', '--help')
    assert code == 2
    assert output.startswith('usage: bash ')
