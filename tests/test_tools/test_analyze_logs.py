import json

import pytest

from tests.tools import load_tool


@pytest.fixture(scope='module')
def tool():
    return load_tool('analysis_tools/analyze_logs')


def make_run(folder, scores, seed=0, name='net'):
    """Two iterations an epoch of 2 s, half of it waiting; a score after each epoch."""
    start = folder / '20260101_000000' / 'vis_data'
    start.mkdir(parents=True)
    lines = []
    for epoch, score in enumerate(scores, 1):
        loss = 1 / epoch
        step = 2 * epoch
        lines.append(dict(loss=loss, time=2.0, data_time=1.0, epoch=epoch, iter=step, step=step))
        if score is not None:
            tns = {'stiffness/tns': 0.5} if epoch == len(scores) else {}
            lines.append({'coco/bbox_mAP': score, **tns, 'step': epoch})
    (start / 'scalars.json').write_text('\n'.join(map(json.dumps, lines)))
    (start / 'config.py').write_text(f"model = '{name}'\nrandomness = dict(seed={seed})\n")
    (folder / f'{name}.py').write_text('')


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / 'runs' / 'a', [0.1, 0.5, 0.4], seed=0)
    make_run(tmp_path / 'runs' / 'b', [0.2, 0.3, 0.8], seed=1)
    make_run(tmp_path / 'runs' / 'c', [None, 0.3], seed=0, name='other')
    return tmp_path / 'runs'


def rows_of(text):
    """Rows by their first cell, table by table; cells are separated by two blanks or more."""
    tables = []
    for block in text.split('\n\n'):
        rows = [
            [cell.strip() for cell in line.split('  ') if cell.strip()]
            for line in block.splitlines()
        ]
        tables.append({row[0]: row[1:] for row in rows})
    return tables


def test_the_folder_of_a_start_stands_for_its_run(tool, runs, capsys, monkeypatch):
    (start, *_) = sorted((runs / 'a').glob('*/vis_data'))
    monkeypatch.chdir(start.parent)
    tool.main(['.'])
    assert '0.3333' in capsys.readouterr().out


def test_tables(tool, runs, capsys):
    tool.main([str(runs)])
    printed = capsys.readouterr()
    values, _, groups, _, times = rows_of(printed.out)
    assert printed.err == ''
    assert values['run'] == [
        *('settings', 'seed', 'epoch', 'loss', 'best', 'coco/bbox_mAP', 'best', 'stiffness/tns'),
    ]
    assert values['a'] == [
        *('net', '0', '3', '0.3333', '0.3333 @ 3', '0.4000', '0.5000 @ 2', '0.5000'),
    ]
    assert values['c'] == [
        *('other', '0', '2', '0.5000', '0.5000 @ 2', '0.3000', '0.3000 @ 2', '0.5000'),
    ]
    # (0.4, 0.8) and (0.5, 0.8): standard deviations 0.4 / sqrt(2) and 0.3 / sqrt(2).
    assert groups['net'] == [
        '2',
        '0.3333 ± 0',
        '0.3333 ± 0',
        '0.60 ± 0.28',
        '0.65 ± 0.21',
        '0.5000 ± 0',
    ]
    assert groups['other'] == ['1', '0.5000', '0.5000', '0.3000', '0.3000', '0.5000']
    assert times['b'] == ['2.000', '2.000', '50.0 %', '4.000', '0:00:12']


def test_runs_that_are_not_as_far_are_left_out_of_the_mean(tool, runs, capsys):
    make_run(runs / 'd', [0.9], seed=2)
    tool.main([str(runs), '--keys', 'coco/bbox_mAP'])
    groups = rows_of(capsys.readouterr().out)[2]
    assert groups['net'] == ['3', '0.60 ± 0.28 (2 of 3)', '0.65 ± 0.21 (2 of 3)']


def test_runs_without_a_quantity_get_a_dash(tool, runs, capsys):
    make_run(runs / 'd', [None], name='third')
    tool.main([str(runs / '[ad]'), '--keys', 'coco/bbox_mAP'])
    values = rows_of(capsys.readouterr().out)[0]
    assert values['a'] == ['net', '0', '3', '0.4000', '0.5000 @ 2']
    assert values['d'] == ['third', '0', '–', '–', '–']


@pytest.mark.parametrize('ending', ('png', 'pdf', 'svg'))
def test_figure(tool, runs, ending, tmp_path, capsys):
    out = tmp_path / 'figures' / f'curves.v2.{ending}'
    tool.main([str(runs / 'a'), str(runs / 'b'), str(runs / 'a'), '--out', str(out)])
    assert out.read_bytes()[:5] in (b'\x89PNG\r', b'%PDF-', b'<?xml')
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert len(rows_of(capsys.readouterr().out)[0]) == 3  # heading, a, b


@pytest.mark.parametrize(
    'arguments, message',
    (
        (['missing'], 'RUN missing: no such folder'),
        (['.', '--out', 'curves.jpg'], '--out must end in .png, .pdf or .svg, got curves.jpg'),
        (['empty'], 'RUN empty: no training has logged there'),
        (['runs', '--keys', 'mAP', 'loss'], '--keys: no log has mAP; there are loss, time'),
    ),
)
def test_bad_input_is_one_line(tool, runs, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(runs.parent)
    (runs.parent / 'empty').mkdir()
    with pytest.raises(SystemExit, match='2'):
        tool.main(arguments)
    assert message in capsys.readouterr().err


def test_a_run_that_diverged_at_once(tool, runs, capsys):
    make_run(runs / 'd', [float('nan')] * 2, seed=2, name='diverged')
    tool.main([str(runs)])
    values, *_ = rows_of(capsys.readouterr().out)
    assert '–' in values['d']
