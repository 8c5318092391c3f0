import json
import os

import numpy as np
import pytest
import torch

from mmstepnet.stiffness import report as report_module
from mmstepnet.stiffness.report import (
    build_report,
    check_report,
    read_report,
    read_samples,
    write_report,
)

# One stage of two blocks: the first sample has mean 2 and maximum 3, so the rectangle
# [0, 3 / 2 - 1] x [0, 3] of area 1.5; the second is flat, so its rectangle has no width.
NSI = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
DT = torch.tensor([[0.25, 0.5], [0.75, 0.5]])
STAGES = torch.tensor([1, 1])
NAMES = ['layer1.1', 'layer1.2']


@pytest.fixture
def report():
    return build_report(
        NSI,
        STAGES,
        NAMES,
        'attention',
        DT,
        m1=[0.0, 0.25],
        m2=[0.0, 2.5],
        model='net',
        dataset='digits/val',
        metrics={'accuracy/top1': np.float32(50), 'coco/bbox_mAP_s': float('nan')},
        versions={'torch': '2'},
        num_omitted=3,
        split='val',
    )


def test_values_computed_by_hand(report):
    assert report['format'] == 'mmstepnet.stiffness/1'
    assert report['num_samples'] == 2
    assert report['num_omitted'] == 3
    # Areas 1.5 and 0: mean 0.75, standard deviation 1.5 / sqrt(2), over sqrt(2).
    assert report['tns'] == {'mean': pytest.approx(0.75), 'std_error': pytest.approx(0.75)}
    assert report['nsi_mean'] == [1.5, 2.5]
    assert report['dt_mean'] == [0.5, 0.5]
    # Thresholds (M1, M2) of sample 1: 2, 2.5 / 2.5, 2.5; of sample 2: 2, 2.5 / 2.5, 2.5.
    assert report['surfaces']['delta'] == [[1.0, 0.5], [0.5, 0.5]]
    assert report['surfaces']['p_hat'] == [[0.75, 0.25], [0.25, 0.25]]


def test_a_path_that_is_not_utf8_is_shown_by_its_bytes(tmp_path):
    path = os.fsdecode(b'r\xe9seau.py')
    report = build_report(NSI, STAGES, NAMES, 'unit', model=path, config=path, note=[path])
    write_report(tmp_path / 'report.json', report)
    report = read_report(tmp_path / 'report.json')
    assert [report['model'], report['config'], *report['note']] == ['r\\udce9seau.py'] * 3


def test_description_is_kept(report):
    assert (report['model'], report['dataset'], report['split']) == ('net', 'digits/val', 'val')
    assert report['config'] is None
    assert report['metrics'] == {'accuracy/top1': 50.0, 'coco/bbox_mAP_s': None}


def test_default_axes_end_where_one_sample_in_a_hundred_remains():
    largest = torch.linspace(1, 2, 101, dtype=torch.float64)  # its 99 % quantile is 1.99
    nsi = torch.stack([largest, torch.ones_like(largest)], dim=1)
    surfaces = build_report(nsi, STAGES, NAMES, 'unit')['surfaces']
    assert surfaces['m2'][0] == 0
    assert surfaces['m2'][-1] == pytest.approx(2.0)
    # NSI / mean - 1 = (x - 1) / (x + 1), at x = 1.99: 0.3311, rounded up to two digits.
    assert surfaces['m1'][-1] == pytest.approx(0.34)
    assert len(surfaces['m1']) == len(surfaces['m2']) == 41


def test_one_block_a_stage_has_no_tns_and_still_a_report():
    report = build_report(NSI, [0, 1], NAMES, 'unit')
    assert report['tns'] == {'mean': 0.0, 'std_error': 0.0}


def test_one_sample_has_no_standard_error():
    assert build_report(NSI[:1], STAGES, NAMES, 'unit')['tns']['std_error'] is None


def test_round_trip(report, tmp_path):
    path = write_report(tmp_path / 'new' / 'test.json', report, NSI, DT)
    stored = read_report(path)
    samples = stored.pop('samples')
    assert samples['file'] == 'test.npz'
    assert stored == {key: value for key, value in report.items() if key != 'samples'}
    nsi, dt = read_samples(path)
    assert torch.equal(nsi, NSI.double())
    assert torch.equal(dt, DT.double())
    assert sorted(os.listdir(path.parent)) == ['test.json', 'test.npz']


def test_samples_stand_on_their_own(report, tmp_path):
    write_report(tmp_path / 'r.json', report, NSI)
    with np.load(tmp_path / 'r.npz', allow_pickle=False) as arrays:
        assert arrays['stages'].tolist() == [1, 1]
        assert arrays['names'].tolist() == NAMES
        assert 'dt' not in arrays
    assert read_samples(tmp_path / 'r.json')[1] is None


def test_report_without_samples(report, tmp_path):
    path = write_report(tmp_path / 'r.json', report)
    assert read_report(path)['samples'] is None
    with pytest.raises(FileNotFoundError, match=r'r\.json: .*without per-sample values'):
        read_samples(path)


@pytest.mark.parametrize('survivors', [0, 1])
def test_death_while_writing_leaves_the_old_report(report, tmp_path, monkeypatch, survivors):
    path = write_report(tmp_path / 'r.json', report, NSI, DT)
    old = path.read_text()
    replace, calls = os.replace, []

    def dying_replace(source, target):
        calls.append(target)
        if len(calls) > survivors:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(report_module.os, 'replace', dying_replace)
    with pytest.raises(KeyboardInterrupt):
        write_report(path, {**report, 'model': 'other'}, NSI + 1, DT)
    assert path.read_text() == old
    assert sorted(os.listdir(tmp_path)) == ['r.json', 'r.npz']
    if survivors:
        with pytest.raises(ValueError, match=r'r\.npz: not the samples of .*r\.json'):
            read_samples(path)
    else:
        assert torch.equal(read_samples(path)[0], NSI.double())


@pytest.mark.parametrize('length', [0, 1, 500, -3])
def test_truncated_report_is_named(report, tmp_path, length):
    path = write_report(tmp_path / 'r.json', report, NSI)
    path.write_text(path.read_text()[:length])
    with pytest.raises(ValueError, match=r'r\.json: not a complete JSON file .*truncated'):
        read_report(path)


def test_truncated_samples_are_named(report, tmp_path):
    path = write_report(tmp_path / 'r.json', report, NSI)
    samples = tmp_path / 'r.npz'
    samples.write_bytes(samples.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r'r\.npz: not the samples'):
        read_samples(path)


def test_binary_file_is_named(report, tmp_path):
    write_report(tmp_path / 'r.json', report, NSI)
    with pytest.raises(ValueError, match=r'r\.npz: not a text file'):
        read_report(tmp_path / 'r.npz')


@pytest.mark.parametrize('content', ['[]', '{}', '"text"', '{"tns": 1}'])
def test_other_json_is_no_report(tmp_path, content):
    path = tmp_path / 'config.json'
    path.write_text(content)
    with pytest.raises(ValueError, match=r'config\.json: key "format" is missing'):
        read_report(path)


@pytest.mark.parametrize('number', ['NaN', '-Infinity', '1e999', '1' * 400, '1' * 5000])
@pytest.mark.parametrize('key', ['tns', 'metrics'])
def test_numbers_that_are_not_finite_are_named(report, tmp_path, number, key):
    path = write_report(tmp_path / 'a.json', report)
    content = {**read_report(path), key: {'mean': 'HERE'}}
    path.write_text(json.dumps(content).replace('"HERE"', number))
    with pytest.raises(ValueError, match=rf'a\.json: .*{number[:20]}.*finite'):
        read_report(path)


def test_endless_nesting_is_named(tmp_path):
    (tmp_path / 'a.json').write_text('[' * 100_000)
    with pytest.raises(ValueError, match=r'a\.json: not a stiffness report'):
        read_report(tmp_path / 'a.json')


def test_other_format_is_named(report, tmp_path):
    path = tmp_path / 'r.json'
    path.write_text(json.dumps({**report, 'format': 'mmstepnet.stiffness/2'}))
    with pytest.raises(ValueError, match=r'r\.json: key "format": .*stiffness/1.*stiffness/2'):
        read_report(path)


def every_key(report):
    for key, value in report.items():
        if key in ('split', 'format'):
            continue
        yield key
        if key in ('tns', 'surfaces'):
            yield from (f'{key}.{inner}' for inner in value)


def test_every_missing_key_is_named(report):
    keys = list(every_key(report))
    assert {'created', 'samples', 'tns.std_error', 'surfaces.p_hat', 'metrics'} <= set(keys)
    for key in keys:
        broken = json.loads(json.dumps(report))
        outer, _, inner = key.rpartition('.')
        del (broken[outer] if outer else broken)[inner]
        with pytest.raises(ValueError, match=f'^here: key "{key}" is missing'):
            check_report(broken, source='here')


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        ('created', 'yesterday'),
        ('model', 3),
        ('step', 'half'),
        ('num_samples', 0),
        ('num_samples', True),
        ('num_omitted', -1),
        ('metrics', []),
        ('versions', {'torch': 2}),
        ('names', []),
        ('names', 'layer1.1'),
        ('stages', [1]),
        ('stages', [1, 1.5]),
        ('nsi_mean', [1.0, -1.0]),
        ('nsi_mean', [1.0, float('nan')]),
        ('dt_mean', [1.0]),
        ('tns', 0.75),
        ('tns.mean', float('inf')),
        ('tns.std_error', None),
        ('surfaces.m1', [0.25, 0.0]),
        ('surfaces.m2', [-1.0, 0.0]),
        ('surfaces.m2', []),
        ('surfaces.delta', [[1.0, 0.5]]),
        ('surfaces.p_hat', [[1.0, 0.5], [0.5, 1.5]]),
        ('samples', {'file': '../r.npz', 'sha256': '0' * 64}),
        ('samples', {'file': 'r.npz', 'sha256': 'short'}),
    ],
)
def test_wrong_value_is_named(report, key, value):
    broken = json.loads(json.dumps(report))
    outer, _, inner = key.rpartition('.')
    (broken[outer] if outer else broken)[inner] = value
    with pytest.raises(ValueError, match=rf'^here: key "{key}[.\w]*": expected .*, got'):
        check_report(broken, source='here')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(step='half'), 'step must be one of'),
        (dict(names=NAMES[:1]), 'names must be one for each of the 2 blocks of nsi, got 1'),
        (dict(stages=[1]), 'stages'),
        (dict(nsi=torch.empty(0, 2)), 'nsi is empty'),
        (dict(nsi=NSI * torch.tensor([1.0, torch.nan])), 'nsi of sample 0, block 1 is nan'),
        (dict(dt=DT[:1]), r'dt must have the shape \(2, 2\)'),
        (dict(dt=DT / 0), 'dt of sample 0, block 0 is inf'),
        (dict(tns=1), r"info must not hold .*\['tns'\]"),
        (dict(m1=[-0.5, 0.5]), 'm1'),
        (dict(m1=[0.5, 0.0]), 'surfaces.m1'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    given = {**dict(nsi=NSI, stages=STAGES, names=NAMES, step='unit'), **arguments}
    with pytest.raises(ValueError, match=message):
        build_report(**given)


def test_writing_checks_its_arguments(report, tmp_path):
    with pytest.raises(ValueError, match=r'path must end in \.json'):
        write_report(tmp_path / 'report.txt', report)
    with pytest.raises(ValueError, match=r'nsi must have the shape \(2, 2\)'):
        write_report(tmp_path / 'r.json', report, NSI[:1])
    with pytest.raises(ValueError, match='dt was given without nsi'):
        write_report(tmp_path / 'r.json', report, dt=DT)
    with pytest.raises(ValueError, match='"tns" is missing'):
        write_report(tmp_path / 'r.json', {k: v for k, v in report.items() if k != 'tns'})
    assert os.listdir(tmp_path) == []
