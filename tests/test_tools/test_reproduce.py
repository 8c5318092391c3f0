import csv
import importlib.util
import json
import signal
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / 'tools' / 'reproduce.py'


@pytest.fixture(scope='module')
def tool():
    spec = importlib.util.spec_from_file_location('reproduce', TOOL)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules['reproduce'] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules['reproduce']


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
    assert len(commands) == 6
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
