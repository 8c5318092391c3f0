import json
import pickle
import sys

import pytest
import timm
import torch
import torchvision
from mmengine.config import Config

from mmstepnet.utils.command_line import build_model

pytest.importorskip('mmpretrain')


@pytest.fixture
def call(load_tool, monkeypatch):
    """Run a converter's ``main`` in this process."""

    def run(tool, *arguments):
        monkeypatch.setattr(sys, 'argv', [tool, *map(str, arguments)])
        load_tool(f'model_converters/{tool}').main()

    return run


@pytest.fixture
def refused(call, capsys):
    """The message with which a converter ends on bad input."""

    def run(tool, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit, match='2'):
            call(tool, *arguments)
        output = capsys.readouterr()
        assert output.out == ''
        return output.err.strip().splitlines()[-1]

    return run


def randomise(net):
    for name, value in net.state_dict().items():
        if name.endswith('running_var'):
            value.uniform_(0.5, 2)
        elif name.endswith('running_mean') or '.step_size.' in name:
            value.copy_(0.3 * torch.randn(value.shape))
    return net.eval()


def predict(toy, monkeypatch, config, checkpoint, *flags):
    """Class scores of the test set by ``tools/test.py``, in the order of the data set."""
    monkeypatch.setattr(toy, 'config', config)
    work_dir = config.parent / 'run'  # not the folder of the config, which is written there
    out = work_dir / 'predictions.pkl'
    toy.call(monkeypatch, 'test', checkpoint, '--work-dir', work_dir, '--out', out, *flags)
    return torch.stack([sample['pred_score'] for sample in pickle.loads(out.read_bytes())])


def test_what_is_said_about_plain_weights(call, tmp_path, capsys):
    source, target = tmp_path / 'resnet18.pth', tmp_path / 'new' / 'converted.pth'
    torch.save(dict(model=torchvision.models.resnet18().state_dict(), epoch=3), source)
    call('convert_resnet', source, target)
    assert capsys.readouterr().out.splitlines() == [
        f"{source}: weights under 'model'",
        "backbone=dict(type='mmstepnet.StepResNet', depth=18)",
        "head=dict(type='LinearClsHead', num_classes=1000, in_channels=512)",
        'A backbone alone takes no notice of head.fc.weight and head.fc.bias.',
        'No step sizes in it: those that plugins add start fresh (layerI.J.step.*).',
    ]
    written = target.read_bytes()
    call('convert_resnet', source, target)
    assert target.read_bytes() == written


def test_what_is_said_about_a_backbone_with_attention(call, tmp_path, capsys):
    torch.save(timm.create_model('seresnet18', num_classes=0).state_dict(), tmp_path / 'se.pth')
    call('convert_resnet', tmp_path / 'se.pth', tmp_path / 'out.pth')
    backbone, classifier = capsys.readouterr().out.splitlines()
    assert "plugins=[{'cfg': {'type': 'mmstepnet.SqueezeExcitation', 'reduction': 8}" in backbone
    assert classifier == 'No classifier in it: it serves as a backbone.'


def test_bad_input_of_convert_resnet_is_one_line(refused, tmp_path):
    target = tmp_path / 'target.pth'
    assert refused('convert_resnet', tmp_path / 'a.pth', target) == (
        f'error: checkpoint {tmp_path}/a.pth does not exist'
    )
    with torch.device('meta'):
        other = timm.create_model('resnet26').state_dict()
    torch.save(other, tmp_path / 'a.pth')
    assert refused('convert_resnet', tmp_path / 'a.pth', target).startswith(
        f'error: {tmp_path}/a.pth: state_dict: stages of [2, 2, 2, 2] bottleneck blocks;'
    )
    assert refused('convert_resnet', tmp_path / 'a.pth', tmp_path / 'b.bin').endswith(
        f'TARGET must end in .pth, got {tmp_path}/b.bin'
    )
    assert not target.exists()
    torch.save(timm.create_model('resnet18').state_dict(), tmp_path / 'a.pth')
    source = (tmp_path / 'a.pth').read_bytes()
    assert f'TARGET {tmp_path}/a.pth can not be written' in refused(
        'convert_resnet', tmp_path / 'a.pth', tmp_path / 'a.pth'
    )
    assert (tmp_path / 'a.pth').read_bytes() == source


def test_bad_input_of_publish_model_is_one_line(refused, tmp_path):
    target = tmp_path / 'target.pth'
    assert refused('publish_model', tmp_path / 'a.pth', target) == (
        f'error: checkpoint {tmp_path}/a.pth does not exist'
    )
    torch.save(dict(state_dict=dict(a=torch.zeros(3)), meta={}), tmp_path / 'a.pth')
    assert refused('publish_model', tmp_path / 'a.pth', tmp_path / 'b.bin').endswith(
        f'OUT must end in .pth, got {tmp_path}/b.bin'
    )
    (tmp_path / 'file').write_bytes(b'')
    assert refused('publish_model', tmp_path / 'a.pth', tmp_path / 'file' / 'b.pth').startswith(
        f'error: OUT {tmp_path}/file/b.pth can not be written: '
    )
    content = (tmp_path / 'a.pth').read_bytes()
    (tmp_path / 'a.pth').write_bytes(content[:-20])
    assert refused('publish_model', tmp_path / 'a.pth', target) == (
        f'error: checkpoint {tmp_path}/a.pth is truncated: it ends after {len(content) - 20} bytes'
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.pth', 'file']


@pytest.mark.slow
def test_published_training_has_the_averaged_weights(call, toy, tmp_path, monkeypatch, capsys):
    """By hand: a moving average with momentum 1/2 that starts at the first step's weights."""
    config = tmp_path / 'ema.py'
    config.write_text(
        toy.config.read_text()
        + "custom_hooks = [dict(type='EMAHook', momentum=0.5)]\n"
        + "train_dataloader['sampler'] = dict(type='InfiniteSampler')\n"
        + 'train_cfg = dict(by_epoch=False, max_iters=2)\n'
        + "param_scheduler['by_epoch'] = False\n"
        + "default_hooks['checkpoint'].update(by_epoch=False)\n"
    )
    monkeypatch.setattr(toy, 'config', config)
    toy.call(monkeypatch, 'train', '--work-dir', tmp_path / 'run', '--no-validate')
    raw = []
    for step in (1, 2):
        content = torch.load(tmp_path / 'run' / f'iter_{step}.pth')
        ema = content['ema_state_dict']
        raw.append({k.removeprefix('module.'): v for k, v in ema.items() if k != 'steps'})
    call('publish_model', tmp_path / 'run' / 'iter_2.pth', tmp_path / 'toy.pth')
    assert 'The weights are the averaged ones of the EMAHook.' in capsys.readouterr().out
    (path,) = tmp_path.glob('toy-*.pth')
    published = torch.load(path, weights_only=True)
    assert published.keys() == {'meta', 'state_dict'}
    assert published['meta']['dataset_meta'] == dict(classes=('negative', 'positive'))
    for key, value in published['state_dict'].items():
        assert not torch.equal(raw[0][key], raw[1][key])
        torch.testing.assert_close(value, (raw[0][key] + raw[1][key]) / 2)
    assert path.stat().st_size < (tmp_path / 'run' / 'iter_2.pth').stat().st_size

    results = []
    for checkpoint in (path, tmp_path / 'run' / 'iter_2.pth'):
        out = tmp_path / 'metrics.json'
        toy.call(
            *(monkeypatch, 'test', checkpoint, '--work-dir', tmp_path / 'run'),
            *('--out', out, '--out-item', 'metrics', '--cfg-options', 'randomness.seed=0'),
        )
        results.append(json.loads(out.read_text()))
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_converted_network_tests_as_a_whole_classifier(
    call, toy, classifier, pictures, tmp_path, monkeypatch, capsys
):
    """By what the tool printed; the scores are those of timm's network on the same pictures."""
    cv2 = pytest.importorskip('cv2')
    net = randomise(timm.create_model('seresnet18', num_classes=2))
    torch.save(net.state_dict(), tmp_path / 'se.pth')
    call('convert_resnet', tmp_path / 'se.pth', tmp_path / 'converted.pth')
    backbone, head, _ = capsys.readouterr().out.splitlines()
    config = tmp_path / 'converted.py'
    neck = "neck=dict(type='GlobalAveragePooling')"
    config.write_text(
        f"{classifier}\nmodel = dict(type='ImageClassifier', {backbone}, {neck}, {head})"
    )
    scores = predict(toy, monkeypatch, config, tmp_path / 'converted.pth')

    paths = sorted(pictures.glob('*/*.png'))
    images = [cv2.imread(str(path), cv2.IMREAD_COLOR_RGB) for path in paths]
    x = torch.stack([torch.from_numpy(image) for image in images]).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = net((x - 127.0) / 60.0).softmax(1)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_deployed_checkpoint_is_tested_as_it_is(
    call, refused, toy, classifier, tmp_path, monkeypatch
):
    config, checkpoint = tmp_path / 'classifier.py', tmp_path / 'model.pth'
    config.write_text(classifier)
    model = randomise(build_model(Config.fromfile(config)))
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    call('to_deploy', config, checkpoint, tmp_path / 'deployed.pth', '--size', 64, 64)
    call('publish_model', tmp_path / 'deployed.pth', tmp_path / 'small.pth')
    (published,) = tmp_path.glob('small-*.pth')
    for flags in ((), ('--tta',)):
        expected = predict(toy, monkeypatch, config, checkpoint, *flags)
        for folded in (tmp_path / 'deployed.pth', published):
            scores = predict(toy, monkeypatch, config, folded, *flags)
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    message = refused('to_deploy', config, published, tmp_path / 'twice.pth')
    assert 'is folded for deployment, which only tools/test.py loads' in message
