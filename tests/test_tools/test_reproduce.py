import csv
import json
import signal
import subprocess
import sys
import time

import pytest

from tests.tools import TOOLS, load_tool

TOOL = TOOLS / 'reproduce.py'


@pytest.fixture
def tool():
    return load_tool('reproduce')


@pytest.fixture
def reproduce(tool, monkeypatch, capsys):
    """Run the tool with arguments and return what it printed."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        monkeypatch.setattr(sys, 'argv', ['reproduce.py', *map(str, arguments)])
        tool.main()
        return capsys.readouterr().out

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
def test_moons_from_training_to_table_and_only_once(reproduce, tmp_path):
    options = ('moons', '--work-dir', tmp_path, '--seeds', 1, '--steps', 2)
    first = reproduce(*options)
    assert '[12/12] digits metric seed 0' in first
    with (tmp_path / 'moons/moons.csv').open() as file:
        rows = list(csv.DictReader(file))
    assert [row['attention'] for row in rows] == [
        'self-attention', 'L2 attention', 'metric attention',
    ]  # fmt: skip
    result = json.loads((tmp_path / 'moons/residual/l2/seed0/result.json').read_text())
    assert float(rows[1]['accuracy (%)']) == round(result['metrics']['accuracy'], 1)
    assert (tmp_path / 'moons/figures/moons_residual.png').stat().st_size > 10_000

    # A run that is not finished is the only one that is done.
    (tmp_path / 'moons/plain/dot/seed0/result.json').unlink()
    assert reproduce(*options, '--dry-run').startswith(f'{tmp_path}/moons/plain/dot/seed0\n1 runs')
    again = reproduce(*options)
    assert '11 of 12 runs are already there' in again and '[1/1] plain dot seed 0' in again
    assert again.split('\n\n', 1)[1] == first.split('\n\n', 1)[1]


def test_dry_run_lists_commands(reproduce, tmp_path):
    out = reproduce('digits-attention', '--work-dir', tmp_path, '--seeds', 1, '--dry-run')
    commands = out.splitlines()[:-1]
    assert len(commands) == 7
    assert all('tools/train.py' in c and 'randomness.seed=0' in c for c in commands)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('moons', '--seeds', '0'), '--seeds'),
        (('moons', '--collect'), 'no run of moons'),
        (('table9',), 'invalid choice'),
    ],
)
def test_bad_input_is_one_message(reproduce, tmp_path, capsys, arguments, message):
    command, *rest = arguments
    with pytest.raises(SystemExit) as ended:
        reproduce(command, '--work-dir', tmp_path, *rest)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def trained(tool, monkeypatch):
    """Training replaced by a result; returns the runs and the GPUs that each one saw."""
    calls = []

    def execute(table, run, gpus, env):
        calls.append((run.column, run.row, run.seed, gpus, env['CUDA_VISIBLE_DEVICES']))
        metrics = dict(last=94.0 + run.seed, best=95.0, parameters=1_704_154)
        return dict(metrics=metrics, gpus=gpus)

    monkeypatch.setattr(tool.PaperTable, 'execute', execute)
    monkeypatch.setattr('torch.cuda.device_count', lambda: 16)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    return calls


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: 0)


def test_dry_run_shows_what_a_cluster_would_run(reproduce, tmp_path, no_gpu):
    options = ('--data', 'cifar10', '--methods', 'stepnet', 'se', 'org', '--gpus', 8, '--dry-run')
    lines = reproduce('table1', '--work-dir', tmp_path, *options).splitlines()
    assert lines[-1] == '15 runs are missing, about 18.0 GPU hours (an estimate)'
    assert lines[0].startswith(f'{tmp_path}/resnet164/cifar10/stepnet/seed0  {sys.executable}')
    assert 'resnet164_stepnet_164e_cifar10.py' in lines[0] and 'batch_size=128' in lines[0]
    lines = reproduce('table3', '--work-dir', tmp_path, '--dry-run').splitlines()
    assert len(lines) == 11
    assert 'dist_train.sh' in lines[0] and 'faster_rcnn_r50_org_1x_coco.py 8 ' in lines[0]
    assert not list(tmp_path.iterdir())


def test_runs_share_the_gpus_and_the_table_stands_beside_the_paper_s(reproduce, tmp_path, trained):
    options = ('--data', 'resnet34', '--methods', 'org', 'se', '--seeds', 2)
    gpus = ('--gpus', 9, '--gpus-per-run', 4)
    out = reproduce('table2', '--work-dir', tmp_path, *options, *gpus)
    assert sorted(call[:3] for call in trained) == [
        ('resnet34', row, seed) for row in ('org', 'se') for seed in (0, 1)
    ]
    assert {call[3:] for call in trained} <= {(4, '0,1,2,3'), (4, '4,5,6,7')}
    assert 'ResNet-34  SE      1.70            2      94.50 ± 0.71' in out
    assert (
        (tmp_path / 'table2/table2.md')
        .read_text()
        .endswith(
            '| ResNet-34 | SE | 1.70 | 2 | 94.50 ± 0.71 | 95.00 ± 0.00 | 74.37 ± 0.10 | - |\n'
        )
    )
    trained.clear()
    collected = reproduce('table2', '--work-dir', tmp_path, *options, '--collect')
    assert not trained and collected == out.split('\n', 4)[-1]


def test_tables_of_one_network_share_their_runs(reproduce, tmp_path, trained):
    options = ('--work-dir', tmp_path, '--data', 'stl10', '--seeds', 1, '--gpus', 1)
    reproduce('table1', *options, '--methods', 'stepnet')
    out = reproduce('table4', *options, '--methods', 'stepnet', 'stepnet-d')
    assert [call[1] for call in trained] == ['stepnet', 'stepnet-d']
    assert '86.08 ± 0.11' in out and '85.62 ± 0.44' in out


def test_slurm_array_job(reproduce, tmp_path, trained, monkeypatch):
    options = ('--work-dir', tmp_path, '--data', 'stl10', '--methods', 'org', 'se', 'eca')
    options += ('--seeds', 1)
    reproduce('table1', *options, '--gpus', 1, '--task', 1)
    assert [call[1] for call in trained] == ['se']

    bin_dir = tmp_path / 'bin'
    bin_dir.mkdir()
    sbatch = bin_dir / 'sbatch'
    sbatch.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/submitted\nexit 3\n')
    sbatch.chmod(0o755)
    slurm = ('--launcher', 'slurm', '--sbatch=--partition=gpu')
    printed = reproduce('table1', *options, *slurm, '--dry-run')
    assert not (tmp_path / 'table1').exists()
    monkeypatch.setenv('PATH', f'{bin_dir}:/usr/bin:/bin')
    with pytest.raises(SystemExit) as ended:
        reproduce('table1', *options, *slurm)
    assert ended.value.code == 3
    script = tmp_path / 'table1/slurm/table1.sbatch'
    assert (tmp_path / 'submitted').read_text().strip() == str(script)
    assert script.read_text() == printed
    assert '#SBATCH --array=0,2\n' in printed and '#SBATCH --partition=gpu\n' in printed
    assert '#SBATCH --gres=gpu:1\n' in printed
    subprocess.run(['bash', '-n', str(script)], check=True)


def test_without_sbatch_the_script_is_left_to_the_user(reproduce, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(SystemExit):
        reproduce('vit', '--work-dir', tmp_path, '--launcher', 'slurm')
    assert f'sbatch {tmp_path}/vit/slurm/vit.sbatch' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('table1', '--data', 'mnist'), 'invalid choice'),
        (('table1', '--methods', 'sge'), 'invalid choice'),
        (('table2', '--gpus', 4, '--gpus-per-run', 8), '--gpus-per-run between 1 and --gpus'),
        (('table2', '--gpus', 3, '--gpus-per-run', 3), 'do not divide the batch size 256'),
        (('table2', '--gpus', -1), '--gpus must be at least 0'),
        (('digits', '--gpus', 0, '--jobs', 0), '--jobs must be at least 1'),
        (('digits', '--gpus', 0, '--task', 60), '--task must lie in 0..59'),
    ],
)
def test_bad_requests(reproduce, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        reproduce(*arguments, '--work-dir', tmp_path)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(tmp_path):
    command = [sys.executable, str(TOOL), 'digits', '--work-dir', str(tmp_path), '--gpus', '0']
    command += ['--seeds', '1', '--methods', 'stepnet', '--jobs', '1']
    run = tmp_path / 'small/digits-hard/stepnet/seed0'
    with subprocess.Popen(command) as process:
        while not list(run.glob('epoch_*.pth')):
            assert process.poll() is None
            time.sleep(0.2)
        process.terminate()
    done = max(int(path.stem.removeprefix('epoch_')) for path in run.glob('epoch_*.pth'))
    assert process.returncode == 128 + signal.SIGTERM
    assert not (run / 'result.json').exists()
    subprocess.run(command, check=True)
    logs = sorted(run.glob('*/vis_data/scalars.json'))
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    first, second = ({line['step'] for line in log if 'loss' not in line} for log in lines)
    # An epoch whose checkpoint is there is not trained again, evaluated or not.
    # Also that of an epoch whose evaluation was broken off.
    assert first <= {*range(1, done + 1)} and second == {*range(1, 31)} - first
    result = json.loads((run / 'result.json').read_text())

    # Killed between the last checkpoint and its evaluation.
    (run / 'result.json').unlink()
    text = logs[1].read_text().splitlines(keepends=True)
    logs[1].write_text(''.join(text[:-1]))
    subprocess.run(command, check=True)
    again = json.loads((run / 'result.json').read_text())
    assert again['metrics'] == pytest.approx(result['metrics'])
    table = (tmp_path / 'digits/digits.csv').read_text().splitlines()
    assert table[1].startswith('digits,StepNet,0.27,1,')


def test_collecting_submits_nothing(reproduce, tmp_path, monkeypatch):
    sbatch = tmp_path / 'sbatch'
    sbatch.write_text('#!/bin/sh\ntouch "$(dirname "$0")/submitted"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    with pytest.raises(SystemExit):
        reproduce('vit', '--work-dir', tmp_path / 'out', '--launcher', 'slurm', '--collect')
    assert not (tmp_path / 'submitted').exists()


@pytest.mark.parametrize('flag', ['--methods', '--data'])
def test_a_name_given_twice_would_count_twice(reproduce, tmp_path, capsys, flag):
    name = dict(zip(('--methods', '--data'), ('org', 'cifar10'), strict=True))[flag]
    with pytest.raises(SystemExit):
        reproduce('table1', flag, name, name, '--dry-run', '--work-dir', tmp_path)
    assert f'{flag} names something twice: {name} {name}' in capsys.readouterr().err


def test_more_gpus_than_there_are(reproduce, tmp_path, capsys, trained):
    with pytest.raises(SystemExit):
        reproduce('digits', '--gpus', 17, '--work-dir', tmp_path)
    assert '--gpus is 17, but this machine has 16' in capsys.readouterr().err
    assert not trained
    # Elsewhere there may be more.
    reproduce('digits', '--gpus', 17, '--dry-run', '--work-dir', tmp_path)


def test_a_login_nodes_gpus_do_not_count_for_the_cluster(reproduce, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: 1)
    options = ('--launcher', 'slurm', '--dry-run', '--work-dir', tmp_path)
    assert '--gres=gpu:8' in reproduce('table3', *options)


def test_a_work_dir_that_can_not_be_made(reproduce, tmp_path, capsys):
    (tmp_path / 'file').touch()
    with pytest.raises(SystemExit):
        reproduce('diffusion', '--work-dir', tmp_path / 'file')
    assert 'can not be made' in capsys.readouterr().err
