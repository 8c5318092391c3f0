import json
import sys

import pytest

from tests.tools import load_tool

pytest.importorskip('mmdet')
pytest.importorskip('mmpretrain')


@pytest.fixture
def tool(monkeypatch):
    module = load_tool('analysis_tools/benchmark')
    # main() sets it for the whole process.
    monkeypatch.setattr(module.ResidualStep, 'fuse', None)
    return module


def test_ratios_are_taken_round_by_round(tool):
    """A machine that is twice as slow in one round slows both; the ratio does not see it."""
    base, other = [1.0, 2.0, 1.0], [1.5, 3.0, 1.0]
    times = dict.fromkeys(tool.PHASES, base), dict.fromkeys(tool.PHASES, other)
    table = tool.summarise(
        {
            'org': dict(times=times[0], peak_memory=2**21),
            'stepnet': dict(times=times[1], peak_memory=3 * 2**20),
        }
    )
    assert table['org']['training'] == (1, 1, 1)
    # Ratios 1.5, 1.5, 1.
    assert table['stepnet']['training'] == (1.25, 1.5, 1.5)
    assert table['stepnet']['training_seconds'] == 1.5
    lines = tool.markdown(table).splitlines()
    cell = '1.500 (1.250 .. 1.500)'
    assert lines[3] == f'| stepnet | {cell} | {cell} | {cell} | 1.500 (3 MiB) |'
    assert lines[-1] == (
        'org takes: training step 1000 ms, inference 1000 ms, deployed inference 1000 ms.'
    )


@pytest.mark.slow
@pytest.mark.parametrize('fused', ['auto', 'never'])
def test_files(tool, tmp_path, monkeypatch, capsys, fused):
    out = tmp_path / 'new' / 'speed'
    command = ['benchmark.py', '--models', 'stepnet', '--size', '32', '--batch', '2', '--rounds']
    command += ['2', '--warm-up', '0', '--fused', fused, '--device', 'cpu', '--out', str(out)]
    monkeypatch.setattr(sys, 'argv', command)
    tool.main()
    result = json.loads(out.with_suffix('.json').read_text())
    assert list(result['table']) == ['org', 'stepnet']
    assert all(len(times) == 2 for times in result['times']['stepnet'].values())
    # The single operations keep one map a block more than the plain network.
    memory = result['table']['stepnet']['memory']
    assert memory < 1.05 if fused == 'auto' else memory > 1.005
    assert out.with_suffix('.md').read_text().strip() in capsys.readouterr().out
    for ending in ('.png', '.svg'):
        assert out.with_suffix(ending).stat().st_size > 5_000
