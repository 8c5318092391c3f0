import json
import shutil
import sys

import pytest
import torch

import mmstepnet  # noqa: F401  (lets the safe loader read MMEngine's checkpoints)

# Writes down what it was asked for, then starts the tasks as Slurm does. The tools must find their
# way by SLURM_* variables alone.
SRUN = """#!{python}
import json, os, subprocess, sys

options, command = {{}}, sys.argv[1:]
while command and command[0].startswith('--'):
    name, _, value = command.pop(0).partition('=')
    options[name] = value or command.pop(0)
with open(os.environ['SRUN_RECORD'], 'w') as file:
    json.dump(dict(options=options, command=command, path=os.environ['PYTHONPATH']), file)
if os.environ.get('SRUN_ONLY_RECORD'):
    sys.exit()
tasks = [
    subprocess.Popen(
        command,
        env=dict(
            os.environ,
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_NTASKS=options['--ntasks'],
            SLURM_NNODES=options['--nodes'],
            SLURM_NODELIST='localhost',
            SLURM_JOB_ID=str(os.getpid()),
        ),
    )
    for rank in range(int(options['--ntasks']))
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def srun(tmp_path, monkeypatch, toy):
    """Put a stand-in for srun on the PATH; returns what it was asked for."""
    script = tmp_path / 'bin' / 'srun'
    script.parent.mkdir()
    script.write_text(SRUN.format(python=sys.executable))
    script.chmod(0o755)
    record = tmp_path / 'record.json'
    monkeypatch.setitem(toy.env, 'PATH', f'{script.parent}:{toy.env["PATH"]}')
    monkeypatch.setitem(toy.env, 'SRUN_RECORD', str(record))
    for name in ('GPUS', 'GPUS_PER_NODE', 'CPUS_PER_TASK', 'SRUN_ARGS', 'MASTER_PORT'):
        monkeypatch.delitem(toy.env, name, raising=False)
    return lambda: json.loads(record.read_text())


def test_defaults_and_arguments(toy, srun):
    code, output = toy.run(
        *('slurm_train.sh', 'gpu', 'my job', 'a config.py', 'work dir', '--amp'),
        *('--cfg-options', 'a=[1, 2]'),
        SRUN_ONLY_RECORD='1',
    )
    assert code == 0, output
    asked = srun()
    assert asked['options'] == {
        '--partition': 'gpu',
        '--job-name': 'my job',
        '--gres': 'gpu:8',
        '--nodes': '1',
        '--ntasks': '8',
        '--ntasks-per-node': '8',
        '--cpus-per-task': '5',
        '--kill-on-bad-exit': '1',
    }
    python, unbuffered, script, *arguments = asked['command']
    assert (python, unbuffered) == (sys.executable, '-u')
    assert script.endswith('/tools/train.py')
    assert arguments == [
        *('a config.py', '--work-dir', 'work dir', '--launcher', 'slurm'),
        *('--amp', '--cfg-options', 'a=[1, 2]'),
    ]


def test_environment(toy, srun):
    code, output = toy.run(
        *('slurm_test.sh', 'gpu', 'job', 'config.py', 'a checkpoint.pth', '--tta'),
        GPUS='32',
        GPUS_PER_NODE='4',
        CPUS_PER_TASK='12',
        SRUN_ARGS='--time=1:00:00\n--exclude node7',
        SRUN_ONLY_RECORD='1',
    )
    assert code == 0, output
    options = srun()['options']
    assert options['--nodes'] == '8'
    assert options['--ntasks'] == '32'
    assert options['--gres'] == 'gpu:4'
    assert options['--cpus-per-task'] == '12'
    assert options['--time'] == '1:00:00'
    assert options['--exclude'] == 'node7'
    assert srun()['command'][2].endswith('/tools/test.py')
    assert srun()['command'][3:] == [
        *('config.py', 'a checkpoint.pth', '--launcher', 'slurm', '--tta')
    ]


def test_few_gpus_do_not_ask_for_a_whole_node(toy, srun):
    toy.run(*('slurm_train.sh', 'gpu', 'job', 'c.py', 'w'), GPUS='2', SRUN_ONLY_RECORD='1')
    assert srun()['options']['--gres'] == 'gpu:2'
    assert srun()['options']['--ntasks-per-node'] == '2'


@pytest.mark.parametrize(
    ('env', 'message'),
    [
        ({'GPUS': 'many'}, "error: GPUS must be a whole number of at least 1, got 'many'"),
        ({'GPUS': '12'}, 'error: GPUS (12) must be a multiple of GPUS_PER_NODE (8)'),
        ({'PATH': 'FOLDER'}, 'error: there is no srun here'),
    ],
)
def test_bad_input(toy, srun, tmp_path, env, message):
    # A folder with what the script needs: on a cluster the usual ones have srun.
    for name in ('bash', 'dirname'):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = {key: value.replace('FOLDER', str(tmp_path)) for key, value in env.items()}
    code, output = toy.run(*('slurm_train.sh', 'gpu', 'job', 'c.py', 'w'), **env)
    assert code == 2
    assert message in output
    assert toy.run('slurm_train.sh', 'gpu', 'job')[1].startswith('usage: ')


@pytest.mark.slow
def test_two_tasks_train(toy, srun, tmp_path):
    work_dir = tmp_path / 'run'
    code, output = toy.run(
        *('slurm_train.sh', 'gpu', 'job', toy.config, work_dir),
        *('--cfg-options', 'train_cfg.max_epochs=1'),
        GPUS='2',
    )
    assert code == 0, output
    assert torch.load(work_dir / 'epoch_1.pth')['meta']['world_size'] == 2
