import os
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import init_default_scope

from mmstepnet.models import StepResNetCifar
from mmstepnet.registry import MODELS
from mmstepnet.utils.cifar_resnet import convert_cifar_resnet

DATA = Path(os.environ.get('MMSTEPNET_SHARED_DATA', Path(__file__).parents[3] / 'shared' / 'data'))


def _as_others_name_it(net, shortcut, head):
    state = {
        'module.' + key.replace('.downsample.', f'.{shortcut}.'): value
        for key, value in net.state_dict().items()
        if 'num_batches_tracked' not in key
    }
    return {
        **state,
        f'module.{head}.weight': torch.rand(4, 64),
        f'module.{head}.bias': torch.rand(4),
    }


@pytest.mark.parametrize(
    ('arguments', 'shortcut', 'head'),
    [
        (dict(depth=20, block='basic', shortcut='pad'), 'shortcut', 'linear'),
        (dict(depth=14, block='basic', shortcut='projection'), 'shortcut', 'fc'),
        (dict(depth=20, block='bottleneck', shortcut='projection'), 'downsample', 'classifier'),
    ],
)
def test_finds_the_architecture_and_keeps_every_weight(arguments, shortcut, head):
    net = StepResNetCifar(**arguments, widths=(4, 8, 16), in_channels=1)
    state, backbone = convert_cifar_resnet(dict(state_dict=_as_others_name_it(net, shortcut, head)))
    assert backbone == dict(arguments, widths=(4, 8, 16), in_channels=1)
    twin = StepResNetCifar(**backbone)
    twin.load_state_dict(
        {k.removeprefix('backbone.'): v for k, v in state.items() if k.startswith('backbone.')}
    )
    for key, value in net.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key
    assert state['head.fc.weight'].shape == (4, 64)


def test_foreign_names_are_refused():
    with pytest.raises(ValueError, match=r"no weights named 'layer4.0.conv1.weight'"):
        convert_cifar_resnet({'layer4.0.conv1.weight': torch.zeros(1)})


def test_stages_of_unequal_length_are_refused():
    state = {f'layer{i}.0.conv1.weight': torch.zeros(1) for i in (1, 2)}
    with pytest.raises(ValueError, match=r'three stages of equal length, found \[1, 1, 0\] blocks'):
        convert_cifar_resnet(state)


def _run_tool(monkeypatch, *arguments):
    tool = Path(__file__).parents[2] / 'tools' / 'model_converters' / 'cifar_resnet2mmstepnet.py'
    monkeypatch.setattr(sys, 'argv', [str(tool), *map(str, arguments)])
    runpy.run_path(str(tool), run_name='__main__')


def test_tool_writes_a_checkpoint_and_prints_the_backbone(tmp_path, monkeypatch, capsys):
    net = StepResNetCifar(8, block='basic', shortcut='pad', widths=(4, 8, 64))
    torch.save(dict(state_dict=_as_others_name_it(net, 'shortcut', 'linear')), tmp_path / 'a.th')
    _run_tool(monkeypatch, tmp_path / 'a.th', tmp_path / 'new' / 'b.pth')
    assert "depth=8, block='basic', shortcut='pad', widths=(4, 8, 64)" in capsys.readouterr().out
    state = torch.load(tmp_path / 'new' / 'b.pth')['state_dict']
    assert torch.equal(state['backbone.conv1.weight'], net.conv1.weight)


@pytest.mark.parametrize('content', [b'', b'PK not a checkpoint'])
def test_tool_refuses_a_broken_file_and_writes_nothing(tmp_path, monkeypatch, capsys, content):
    (tmp_path / 'a.th').write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        _run_tool(monkeypatch, tmp_path / 'a.th', tmp_path / 'b.pth')
    assert stop.value.code == 1
    assert 'a.th is not a CIFAR ResNet checkpoint' in capsys.readouterr().err
    assert not (tmp_path / 'b.pth').exists()


def _test_pictures():
    """The 10,000 test pictures, (N, 3, 32, 32) normalised, and their labels."""
    pack = np.load(DATA / 'cifar10_jpeg.npz')
    data, offsets = pack['test_jpeg'], pack['test_offsets']
    pictures = np.stack(
        [
            cv2.imdecode(data[start:end], cv2.IMREAD_COLOR)[:, :, ::-1]
            for start, end in pairwise(offsets)
        ]
    )
    pictures = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (pictures - mean) / std, torch.from_numpy(pack['test_labels']).long()


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / 'resnet_cifar10').is_dir(), reason='needs the shared data')
@pytest.mark.parametrize(
    ('file', 'depth', 'accuracy'),
    [
        ('resnet20-12fca82f.th', 20, 81.03),
        ('resnet32-d509ac18.th', 32, 82.56),
        ('resnet56-4bfd9763.th', 56, 83.20),
    ],
)
def test_trained_networks_keep_their_accuracy(file, depth, accuracy):
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    path = DATA / 'resnet_cifar10' / file
    state, backbone = convert_cifar_resnet(torch.load(path, map_location='cpu'))
    assert (backbone['depth'], backbone['block'], backbone['shortcut']) == (depth, 'basic', 'pad')
    model = MODELS.build(
        dict(
            type='mmpretrain.ImageClassifier',
            backbone=dict(type='mmstepnet.StepResNetCifar', **backbone),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
        )
    )
    model.load_state_dict(state)
    model.eval()
    pictures, labels = _test_pictures()
    with torch.inference_mode():
        scores = torch.cat([model(batch) for batch in pictures.split(500)])
    correct = (scores.argmax(1) == labels).double().mean().item() * 100
    assert abs(correct - accuracy) <= 0.1
