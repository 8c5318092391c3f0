import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.config import Config

import mmstepnet  # noqa: F401  (lets the safe loader read MMEngine's checkpoints)

pytest.importorskip('mmcv')

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(load_tool):
    return load_tool('image_demo')


def test_what_an_argument_means(demo, pictures, tmp_path):
    dark = pictures / 'dark'
    assert demo.find_pictures(str(dark / 'dark0.png')) == [str(dark / 'dark0.png')]
    (tmp_path / 'notes.txt').write_text('no picture')
    (tmp_path / 'a.JPG').write_bytes(b'')
    assert demo.find_pictures(str(tmp_path)) == [str(tmp_path / 'a.JPG')]
    assert len(demo.find_pictures(str(pictures / '*' / '*0.png'))) == 2


def test_nothing_there_and_names_that_clash(demo, pictures, tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.find_pictures(str(tmp_path / '*.png'))
    assert 'error: no picture at ' in capsys.readouterr().err
    for suffix in ('png', 'jpg'):
        (tmp_path / f'same.{suffix}').write_bytes(b'')
    with pytest.raises(SystemExit):
        demo.find_pictures(str(tmp_path))
    assert 'would be saved under the same name' in capsys.readouterr().err


def test_unreadable_pictures_are_named(demo, pictures, tmp_path, capsys):
    good, bad = str(pictures / 'dark' / 'dark0.png'), str(tmp_path / 'broken.png')
    (tmp_path / 'broken.png').write_text('not a picture')
    assert demo.leave_out_unreadable([good, bad]) == ([good], [bad])
    assert capsys.readouterr().err == f'error: {bad} is not a readable picture\n'


def test_a_device_that_is_not_there_is_named(demo, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['image_demo.py', 'a.png', 'a.py', 'a.pth', '--device', 'gpu'])
    with pytest.raises(SystemExit, match='2'):
        demo.parse_args()
    assert 'argument --device: no gpu on this machine; it has cpu' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--out', 'a.txt'], '--out must end in .pkl, .pickle or .json, got a.txt'),
        (['--out', 'a.json'], '--out FILE.json is for --out-item metrics'),
        (['--interval', '0'], '--interval must be at least 1, got 0'),
    ],
)
def test_bad_options_of_a_test(load_tool, monkeypatch, capsys, options, message):
    monkeypatch.setattr('sys.argv', ['test.py', 'config.py', 'a.pth', *options])
    with pytest.raises(SystemExit, match='2'):
        load_tool('test').parse_args()
    assert message in capsys.readouterr().err


def test_flips_and_pictures_do_not_go_together_in_mmpretrain(load_tool, classifier, capsys):
    config = Config.fromstring(classifier, '.py')
    test = load_tool('test')
    with pytest.raises(SystemExit, match='2'):
        test.show(config, SimpleNamespace(tta=True))
    assert 'MMPretrain can not draw its batches' in capsys.readouterr().err
    config.default_hooks.visualization = None
    with pytest.raises(SystemExit, match='2'):
        test.show(config, SimpleNamespace(tta=False))
    assert 'need a `visualization` hook' in capsys.readouterr().err


def test_flips_leave_stiffness_out_and_say_so(load_tool, monkeypatch, capsys):
    # Recording needs one pass a picture, and flips make it two.
    config = Config.fromfile(ROOT / 'configs/digits/faster_rcnn_r18_stepnet_digits.py')
    config.test_evaluator = [config.test_evaluator, dict(type='mmstepnet.StiffnessMetric')]
    before = [hook['type'] for hook in config.custom_hooks]
    test = load_tool('test')
    test.leave_out_stiffness(config)
    after = [hook['type'] for hook in config.custom_hooks]
    assert after == [name for name in before if name != 'mmstepnet.StiffnessHook'] != before
    assert [metric['type'] for metric in config.test_evaluator] == ['CocoMetric']
    assert 'stiffness is left out with --tta' in capsys.readouterr().err

    test.leave_out_stiffness(config)
    assert not capsys.readouterr().err
    config.test_evaluator = dict(type='mmstepnet.StiffnessMetric')
    with pytest.raises(SystemExit, match='2'):
        test.leave_out_stiffness(config)


@pytest.mark.slow
@pytest.mark.smoke
def test_classifier_from_training_to_pictures(
    toy, load_tool, pictures, classifier, tmp_path, monkeypatch
):
    """Train, test with and without flips, demo, and MMPretrain's own inferencer."""
    pytest.importorskip('mmpretrain')
    config = tmp_path / 'classifier.py'
    config.write_text(classifier)
    monkeypatch.setattr(toy, 'config', config)
    work_dir, out = tmp_path / 'run', tmp_path / 'metrics.json'
    toy.call(monkeypatch, 'train', '--work-dir', work_dir)
    checkpoint = work_dir / 'epoch_3.pth'
    for options in (('--show-dir', tmp_path / 'shown', '--interval', 2), ('--tta',)):
        toy.call(
            *(monkeypatch, 'test', checkpoint, '--work-dir', work_dir, *options),
            *('--out', out, '--out-item', 'metrics'),
        )
        assert json.loads(out.read_text())['accuracy/top1'] == 100
    assert len(list((tmp_path / 'shown').rglob('*.png'))) == 16 / 2

    (pictures / 'broken.png').write_text('not a picture')
    arguments = (pictures / '**' / '*.png', config, checkpoint, '--out-dir', tmp_path / 'demo')
    monkeypatch.setattr(sys, 'argv', ['image_demo.py', *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        load_tool('image_demo').main()
    assert exit_info.value.code == 2
    predictions = json.loads((tmp_path / 'demo' / 'predictions.json').read_text())
    assert len(predictions) == 16
    assert all(result['pred_class'] in path for path, result in predictions.items())
    assert len(list((tmp_path / 'demo' / 'vis').glob('*.png'))) == 16

    from mmpretrain import ImageClassificationInferencer

    inferencer = ImageClassificationInferencer(str(config), pretrained=str(checkpoint))
    path = str(pictures / 'light' / 'light3.png')
    (result,) = inferencer(path)
    np.testing.assert_allclose(result['pred_scores'], predictions[path]['pred_scores'], rtol=1e-5)
