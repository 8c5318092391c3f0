import json

import pytest

from tests.tools import load_tool

pytest.importorskip('mmpretrain')

CONFIG = """
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
default_scope = 'mmpretrain'
data_preprocessor = dict(mean=[0.0], std=[1.0])
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.StepResNetCifar', depth=8, block='basic', shortcut='pad', in_channels=1,
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))],
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
)
test_dataloader = dict(dataset=dict(pipeline=[dict(type='CenterCrop', crop_size=8)]))
"""


@pytest.fixture(scope='module')
def tool():
    return load_tool('analysis_tools/get_flops')


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'model.py'
    path.write_text(CONFIG)
    return str(path)


def test_table_and_file(tool, config, tmp_path, capsys):
    out = tmp_path / 'new' / 'flops.json'
    tool.main([config, '--out', str(out)])
    printed = capsys.readouterr()
    assert printed.err == ''
    lines = [line.split() for line in printed.out.splitlines()]
    # The stem and two convolutions in each of three blocks, 3 x 3 without bias.
    convolutions = 9 * (16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64)
    norms, adaptors = 2 * (16 + 2 * (16 + 32 + 64)), 6 * (16 + 32 + 64)
    backbone = convolutions + norms + adaptors
    content = json.loads(out.read_text())
    assert content['parts']['backbone']['parameters'] == backbone
    assert content['parameters'] == backbone + 650
    assert content['input_shape'] == [1, 8, 8] and content['flop'] == 'multiply-add'
    assert content['step_sizes']['StepNetAdaptor']['parameters'] == adaptors
    cost = content['step_sizes']['StepNetAdaptor']['flops']
    # Two means over maps, and seven operations a channel.
    assert cost == 2 * (16 * 64 + 32 * 16 + 64 * 4) + 7 * (16 + 32 + 64)
    percent = 100 * cost / content['flops']
    assert content['step_sizes']['StepNetAdaptor']['flops_percent'] == pytest.approx(percent)
    row = next(line for line in lines if line[:1] == ['StepNetAdaptor'])
    assert row == [
        *('StepNetAdaptor', '3', f'{adaptors:,}'),
        *(f'{100 * adaptors / (backbone + 650):.3f}', '%'),
        *(f'{cost / 1000:.4g}', 'k', f'{percent:.3f}', '%'),
    ]
    assert next(line for line in lines if line[:1] == ['total'])[1] == f'{backbone + 650:,}'


def test_shape_and_options_from_the_command_line(tool, config, capsys):
    tool.main([config, '--shape', '4', '12', '--cfg-options', 'model.head.num_classes=100'])
    printed = capsys.readouterr().out
    assert '1 x 4 x 12' in printed
    assert f'{64 * 100 + 100:,}' in printed


@pytest.mark.parametrize(
    'transforms, shape',
    (
        ([dict(type='Resize', scale=(1333, 800), keep_ratio=True)], (800, 1333)),
        ([dict(type='mmdet.Resize', scale=(800, 1333), keep_ratio=True)], (800, 1333)),
        ([dict(type='Resize', scale=(300, 200))], (200, 300)),
        ([dict(type='ResizeEdge', scale=256), dict(type='CenterCrop', crop_size=224)], (224, 224)),
        ([dict(type='CenterCrop', crop_size=(96, 64)), dict(type='PackInputs')], (96, 64)),
        ([dict(type='ResizeEdge', scale=256)], None),
        ([], None),
    ),
)
def test_shape_that_a_pipeline_gives(tool, transforms, shape):
    repeated = dict(dataset=dict(type='RepeatDataset', dataset=dict(pipeline=transforms)))
    assert tool.shape_of_pictures(dict(test_dataloader=repeated)) == shape
    train = dict(
        test_dataloader=dict(dataset=dict(pipeline=[])),
        train_dataloader=dict(dataset=dict(pipeline=transforms)),
    )
    assert tool.shape_of_pictures(train) == shape


@pytest.mark.parametrize(
    'count, label',
    ((0, '0'), (999, '999'), (4592, '4.592 k'), (4_128_206_592, '4.128 G'), (10**12, '1 T')),
)
def test_flops_label(tool, count, label):
    assert tool.flops_label(count) == label


@pytest.mark.parametrize(
    'arguments, message',
    (
        (['--shape', '0', '8'], '--shape must be two positive numbers, got 0 8'),
        (['--out', 'flops.txt'], '--out must end in .json'),
        (['--cfg-options', 'model.head'], 'must be KEY=VALUE'),
        (['--cfg-options', 'model.backbone.depth=9'], 'depth'),
        (['--cfg-options', 'test_dataloader=None'], 'give --shape H W'),
        (['--cfg-options', 'model.backbone.in_channels=3'], '--shape 8 8: a picture of 1 x 8 x 8'),
    ),
)
def test_bad_input_is_one_line(tool, config, arguments, message, capsys):
    with pytest.raises(SystemExit, match='2'):
        tool.main([config, *arguments])
    assert message in capsys.readouterr().err


def test_missing_config(tool, capsys):
    with pytest.raises(SystemExit, match='2'):
        tool.main(['missing.py'])
    assert capsys.readouterr().err == 'error: config missing.py does not exist\n'
