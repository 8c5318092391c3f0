import base64
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from mmstepnet.stiffness.report import build_report, write_report
from tests.tools import load_tool

MARKUP = '<script>alert("x")</script> & $a$ \'b\''


@pytest.fixture(scope='module')
def tool():
    return load_tool('analysis_tools/compare_stiffness')


def write(path, largest=3.0, step='attention', samples=2, **info):
    # One stage of two blocks with NSI 1 and `largest`: every sample has the same TNS.
    nsi = torch.tensor([[1.0, largest]]).repeat(samples, 1)
    dt = torch.full_like(nsi, 0.25)
    dt[0] = 0.5
    names = ['layer1.1', 'layer1.2']
    info = {'model': 'net', 'dataset': 'digits/val', **info}
    report = build_report(nsi, [1, 1], names, step, dt, m1=[0, 1], m2=[0, 1], **info)
    return write_report(path, report, nsi, dt)


class Page(HTMLParser):
    """What a browser would take from the page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.tables, self.texts = [], [], [], []
        self.cell = None
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == 'table':
            self.tables.append([])
        elif tag == 'tr':
            self.tables[-1].append([])
        elif tag in ('td', 'th'):
            self.cell = ''
            self.value = dict(attrs).get('data-value')

    def handle_data(self, data):
        self.texts.append(data)
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ('td', 'th'):
            self.tables[-1][-1].append((self.cell, self.value))
            self.cell = None


def test_page_holds_every_number(tool, tmp_path, capsys):
    write(tmp_path / 'a.json', 3.0, model='a', metrics={'accuracy/top1': 50.0})
    write(tmp_path / 'b.json', 7.0, model='b', metrics={'accuracy/top1': 60.5, 'other': 1e-3})
    tool.main([str(tmp_path / '?.json'), '--out-dir', str(tmp_path / 'out')])

    # TNS by hand: (largest / mean - 1) * largest = (3 / 2 - 1) * 3 and (7 / 4 - 1) * 7.
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == ['a', '1.500', '±', '0', '50.00', '2.000', '3.000', '0.3750', '2', '2']
    assert lines[3] == ['b', '5.250', '±', '0', '60.50', '4.000', '7.000', '0.3750', '2', '2']
    assert all((tmp_path / 'out' / name).exists() for name in ('tns.pdf', 'accuracy_tns.png'))

    table, *blocks = Page(tmp_path / 'out' / 'comparison.html').tables
    assert [text for text, _ in table[0]] == [
        'Model',
        'TNS ± std. error',
        'accuracy/top1 (%)',
        'other',
        'Mean NSI',
        'Largest block mean',
        'Mean step size',
        'Blocks',
        'Samples',
    ]
    assert table[1][:4] == [('a', 'a'), ('1.500 ± 0', '1.5'), ('50.00', '50.0'), ('–', None)]
    assert table[2][3] == ('0.001000', '0.001')
    assert [[row[3][1] for row in rows[1:]] for rows in blocks] == [['1.0', '3.0'], ['1.0', '7.0']]


def test_page_is_complete_in_itself(tool, tmp_path):
    path = write(tmp_path / 'a.json')
    tool.main([str(path), '--out-dir', str(tmp_path)])
    page = Page(tmp_path / 'comparison.html')
    assert not {'iframe', 'object', 'embed', 'base', 'form'} & set(page.tags)
    references = [
        value
        for tag, name, value in page.attributes
        if name in ('src', 'href', 'srcset', 'action', 'poster', 'background')
    ]
    # Across models: TNS, NSI; of the report: delta, p-hat, NSI, step size, both together.
    assert sum(value.startswith('data:image/svg+xml;base64,') for value in references) == 7
    assert all(value.startswith(('data:', '#')) for value in references)
    text = (tmp_path / 'comparison.html').read_text()
    assert '@import' not in text and 'url(' not in text
    assert ('meta', 'name', 'viewport') in page.attributes
    identifiers = [value for _, name, value in page.attributes if name == 'id']
    assert {value[1:] for value in references if value.startswith('#')} <= set(identifiers)

    (content,) = (v for v in references if v.startswith('data:application/json;base64,'))
    saved = json.loads(base64.b64decode(content.partition(',')[2]))
    assert saved == json.loads(path.read_text())


def test_figures_in_the_page_are_drawings_without_references(tool, tmp_path):
    tool.main([str(write(tmp_path / 'a.json')), '--out-dir', str(tmp_path)])
    page = Page(tmp_path / 'comparison.html')
    for tag, name, value in page.attributes:
        if (tag, name) == ('img', 'src'):
            drawing = base64.b64decode(value.partition(',')[2]).decode()
            assert '<svg' in drawing
            references = drawing.split('xlink:href="')[1:]
            assert all(reference.startswith(('#', 'data:')) for reference in references)
    assert all(value for tag, name, value in page.attributes if (tag, name) == ('img', 'alt'))


def test_every_text_is_escaped(tool, tmp_path):
    info = dict.fromkeys(('model', 'dataset', 'config', 'checkpoint'), MARKUP)
    info |= {'metrics': {MARKUP: 1.0, 'text': MARKUP}, 'versions': {MARKUP: MARKUP}}
    path = write(tmp_path / 'a.json', **info)
    tool.main([str(path), '--out-dir', str(tmp_path)])
    page = Page(tmp_path / 'comparison.html')
    assert page.tags.count('script') == 1
    assert page.tables[0][1][0] == (MARKUP, MARKUP)
    assert page.texts.count(MARKUP) >= 5


def test_runs_of_a_model_are_averaged(tool, tmp_path, capsys):
    for run, largest in (('one', 3.0), ('two', 7.0)):
        write(tmp_path / run / 'stiffness' / 'test.json', largest, metrics={'accuracy/top1': 50.0})
    write(tmp_path / 'single' / 'stiffness' / 'test.json', model='other')
    tool.main([str(tmp_path), '--out-dir', str(tmp_path / 'out')])
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert [line[1] for line in lines[2:5]] == ['one', 'single', 'two']
    # Mean of 1.5 and 5.25, their standard deviation 3.75 / sqrt(2).
    assert ['net', '2', '3.4', '±', '2.7'] in lines
    assert ['other', '1', '1.500'] in lines
    assert 'no figure of accuracy' in text
    assert not (tmp_path / 'out' / 'accuracy_tns.png').exists()


def test_runs_are_named_by_their_seeds(tool, tmp_path):
    files = [write(tmp_path / f'{seed}.json', seed=seed) for seed in (3, 4)]
    reports = [json.loads(file.read_text()) for file in files]
    assert tool.name_runs(reports, files) == ['seed 3', 'seed 4']


def test_folder_stands_for_its_newest_report(tool, tmp_path):
    paths = [tmp_path / 'run' / 'stiffness' / f'{name}.json' for name in ('9', '10', 'test')]
    for path, day in zip(paths, (1, 3, 2), strict=True):
        report = json.loads(write(path).read_text())
        report['created'] = f'2026-01-0{day}T00:00:00+00:00'
        write_report(path, report)
    for argument in (tmp_path, tmp_path / 'run', paths[0].parent, tmp_path / 'r*'):
        assert tool.find_reports([str(argument)]) == [paths[1]]
    assert tool.find_reports([str(paths[0]), str(paths[0].parent / '?.json')]) == [paths[0]]


def test_folder_of_copied_reports_stands_for_all(tool, tmp_path):
    paths = [write(tmp_path / f'{name}.json') for name in 'ab']
    assert tool.find_reports([str(tmp_path)]) == paths


def test_report_without_name_is_called_after_its_place(tool, tmp_path, capsys):
    write(tmp_path / 'resnet' / 'stiffness' / 'test.json', model=None)
    tool.main([str(tmp_path), '--out-dir', str(tmp_path / 'out')])
    assert 'resnet/test' in capsys.readouterr().out


def test_missing_samples_are_noted(tool, tmp_path, capsys):
    path = write(tmp_path / 'a.json')
    path.with_suffix('.npz').unlink()
    tool.main([str(path), '--out-dir', str(tmp_path)])
    assert 'a.npz' in capsys.readouterr().err
    assert (tmp_path / 'comparison.html').exists()


def refused(tool, capsys, *arguments):
    with pytest.raises(SystemExit) as error:
        tool.main([str(argument) for argument in arguments])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert 'Traceback' not in message
    return message


@pytest.mark.parametrize(
    ('other', 'what'),
    [
        (dict(dataset='cifar10/test'), "different data sets: 'digits/val' in .*'cifar10/test' in"),
        (dict(dataset=None), "different data sets: 'digits/val' in .*None in"),
        (dict(step='unit'), "different steps: 'attention' in .*'unit' in"),
        (dict(samples=3), 'different numbers of samples: 2 in .*3 in'),
    ],
)
def test_mixed_reports_are_refused(tool, tmp_path, capsys, other, what):
    first, second = write(tmp_path / 'a.json'), write(tmp_path / 'b.json', model='b', **other)
    out = ('--out-dir', tmp_path / 'out')
    message = refused(tool, capsys, first, second, *out)
    assert re.search(what, message)
    assert 'a.json' in message and 'b.json' in message and '--allow-mixed' in message
    assert not (tmp_path / 'out').exists()


def test_mixed_reports_can_be_allowed(tool, tmp_path):
    files = write(tmp_path / 'a.json'), write(tmp_path / 'b.json', dataset='other')
    tool.main([*map(str, files), '--allow-mixed', '--out-dir', str(tmp_path)])
    assert 'Caution' in (tmp_path / 'comparison.html').read_text()


def test_sample_left_out_for_nan_does_not_make_another_data_set(tool, tmp_path):
    files = [
        write(tmp_path / 'a.json', samples=3),
        write(tmp_path / 'b.json', samples=2, num_omitted=1),
    ]
    assert tool.check_comparable([json.loads(f.read_text()) for f in files], files) is None


def test_bad_files_are_named(tool, tmp_path, capsys):
    path = write(tmp_path / 'a.json')
    text = path.read_text()
    path.write_text(text[:300])
    assert 'a.json: not a complete JSON file' in refused(tool, capsys, path)
    path.write_text(text.replace('stiffness/1', 'stiffness/9'))
    assert 'this version reads "mmstepnet.stiffness/1"' in refused(tool, capsys, path)
    path.write_text(text)
    path.with_suffix('.npz').write_bytes(b'')
    message = refused(tool, capsys, path, '--out-dir', tmp_path)
    assert 'a.npz: not the samples of' in message


def test_missing_files_are_named(tool, tmp_path, capsys):
    assert 'nowhere: no such file' in refused(tool, capsys, tmp_path / 'nowhere')
    (tmp_path / 'empty').mkdir()
    assert 'empty: no reports in it' in refused(tool, capsys, tmp_path / 'empty')


def test_metric_must_be_in_every_report(tool, tmp_path, capsys):
    first = write(tmp_path / 'a.json', metrics={'loss': 1.0, 'mAP': 0.5})
    second = write(tmp_path / 'b.json', metrics={'mAP': 0.5})
    message = refused(tool, capsys, first, second, '--metric', 'loss')
    assert "--metric loss: not in every report, which share ['mAP']" in message


def test_help_says_what_it_takes(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(['--help'])
    text = capsys.readouterr().out
    assert all(word in text for word in ('REPORT', '--out-dir', '--metric', '--allow-mixed'))


def test_other_blocks_are_another_measurement(tool, tmp_path, capsys):
    first = write(tmp_path / 'a.json')
    report = json.loads(first.read_text())
    report['names'] = ['layer1.0', 'layer1.1']
    second = tmp_path / 'b.json'
    second.write_text(json.dumps(report))
    assert 'different blocks of one model: net' in refused(tool, capsys, first, second)
    files = [
        write(tmp_path / f'{name}.json', model=name, exclude_first=choice)
        for name, choice in (('c', True), ('d', False), ('e', None))
    ]
    assert 'exclude_first' in refused(tool, capsys, *files)
    reports = [json.loads(file.read_text()) for file in files]
    assert tool.check_comparable(reports[1:], files[1:]) is None
