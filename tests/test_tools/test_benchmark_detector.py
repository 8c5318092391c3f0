"""The benchmark of whole detectors."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip('mmcv')

ROOT = Path(__file__).parents[2]
ORG, STEPNET = (
    str(ROOT / f'configs/digits/faster_rcnn_r18_{name}_digits.py') for name in ('org', 'stepnet')
)


@pytest.fixture
def tool(load_tool, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools' / 'analysis_tools'))
    return load_tool('analysis_tools/benchmark_detector')


def test_an_iteration_trains_the_step_sizes(tool):
    detector = tool.Detector(STEPNET, 2, (64, 64), 'cpu')
    before = {name: value.clone() for name, value in detector.model.named_parameters()}
    detector.iteration()
    gradients = [p.grad.clone() for p in detector.model.parameters() if p.requires_grad]
    assert all(gradient.isfinite().all() for gradient in gradients)
    moved = [n for n, v in detector.model.named_parameters() if not v.equal(before[n])]
    # The adaptors' scales start at 0, which no rate is too small for.
    scales = [name for name in before if name.endswith('.step_size.scale')]
    assert scales and {*scales} <= {*moved}


@pytest.mark.slow
def test_table_and_file(tool, tmp_path, monkeypatch, capsys):
    out = tmp_path / 'new' / 'times.json'
    command = ['benchmark_detector.py', ORG, STEPNET, '--size', '64', '64', '--rounds', '2']
    monkeypatch.setattr(sys, 'argv', [*command, '--out', str(out)])
    tool.main()
    header, _, org, stepnet = capsys.readouterr().out.splitlines()
    assert header.startswith('| config | iteration (s) | relative |')
    assert '| 1.000 | 1.000 .. 1.000 |' in org
    result = json.loads(out.read_text())
    assert [len(times) for times in result['times'].values()] == [2, 2]
    memory = result['memory']
    # Weights, gradients and momentum of 12.3 million parameters.
    assert memory[STEPNET] > memory[ORG] > 3 * 4 * 12.2e6
    assert stepnet.endswith(f'| {memory[STEPNET] / memory[ORG]:.3f} |')


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('--size', '100', '64'), '--size must be multiples of 32, got 100 64'),
        (('--rounds', '1'), '--rounds must be at least 2, got 1'),
        (('--batch', '0'), '--batch must be at least 1, got 0'),
    ],
)
def test_bad_arguments(tool, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, 'argv', ['benchmark_detector.py', ORG, *arguments])
    with pytest.raises(SystemExit, match='2'):
        tool.parse_args()
    assert message in capsys.readouterr().err


def test_a_classifier_is_refused(tool, capsys):
    with pytest.raises(SystemExit, match='2'):
        config = ROOT / 'configs/digits/resnet20_org_12e_digits.py'
        tool.Detector(str(config), 2, (64, 64), 'cpu')
    assert 'is no config of a detector' in capsys.readouterr().err
