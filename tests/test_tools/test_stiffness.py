import os
import subprocess
import sys

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from mmstepnet.stiffness import TrajectoryRecorder, read_report, read_samples
from mmstepnet.utils.command_line import build_model
from tests.tools import TOOLS, load_tool

pytest.importorskip('mmpretrain')
pytest.importorskip('sklearn')

CONFIG = """
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
default_scope = 'mmpretrain'
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.StepResNetCifar', depth=20, block='basic', widths=(4, 8, 8), in_channels=1,
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), position='residual_step')],
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=8, topk=(1,)),
)
data_preprocessor = dict(num_classes=10, mean=[78.0], std=[96.0], to_rgb=False)
pack = [dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=8, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='RepeatDataset', times=3,
        dataset=dict(
            type='mmstepnet.Digits', split='train', indices=30,
            pipeline=[dict(type='RandomFlip', prob=0.5), *pack],
        ),
    ),
)
val_dataloader = dict(
    batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='mmstepnet.Digits', split='test', indices=13, pipeline=pack),
)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type='Accuracy', topk=1)
val_cfg = test_cfg = dict()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))
custom_hooks = [dict(type='mmstepnet.StiffnessHook', figures=False)]
"""
DOUBLE_CLASSIFIER = """
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import MODELS


@MODELS.register_module()
class DoubleClassifier(ImageClassifier):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.double()

    def forward(self, inputs, *args, **kwargs):
        return super().forward(inputs.double(), *args, **kwargs)
"""


@pytest.fixture
def files(tmp_path):
    """Config, checkpoint and the folder they are in."""
    config = tmp_path / 'small.py'
    config.write_text(CONFIG)
    model = build_model(Config.fromfile(config))
    for name, parameter in model.named_parameters():
        if '.step.' in name or '.bn' in name:
            nn.init.normal_(parameter)
    checkpoint = tmp_path / 'epoch_7.pth'
    torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
    return config, checkpoint, tmp_path


@pytest.fixture
def tool(monkeypatch, files):
    """Run the tool in this process on the small config; return its report's path."""
    module = load_tool('analysis_tools/stiffness')
    config, checkpoint, folder = files

    def run(*arguments, checkpoint=checkpoint):
        out = folder / 'out' / 'report.json'
        options = ['--cfg-options', f'experiment_name=tool_{len(list(folder.iterdir()))}']
        monkeypatch.setattr(
            sys,
            'argv',
            ['stiffness.py', str(config), str(checkpoint), '--out', str(out)]
            + ['--work-dir', str(folder / 'work'), '--no-figures', *arguments, *options],
        )
        module.main()
        return out

    return run


@pytest.mark.smoke
def test_the_numbers_are_those_of_the_hook(files, tool, capsys):
    config, checkpoint, folder = files
    cfg = Config.fromfile(config)
    cfg.work_dir, cfg.load_from = str(folder / 'hook'), str(checkpoint)
    metrics = Runner.from_cfg(cfg).val()
    by_hook, by_tool = folder / 'hook' / 'stiffness' / 'val.json', tool()
    for mine, theirs in zip(read_samples(by_tool), read_samples(by_hook), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = read_report(by_tool), read_report(by_hook)
    for key in set(theirs) - {'created', 'seed', 'samples'}:
        assert mine[key] == theirs[key], key
    assert mine['metrics'] == {'accuracy/top1': metrics['accuracy/top1']}
    out = capsys.readouterr().out
    assert f'stiffness/tns            {metrics["stiffness/tns"]:.6g}' in out
    assert 'accuracy/top1' in out and f'report: {by_tool}' in out


def test_training_pictures_come_once_and_without_augmentation(tool, files):
    path = tool('--split', 'train', '--step', 'unit', '--include-first')
    report = read_report(path)
    assert (
        report['dataset'] == 'Digits train (indices 30), 30 samples' and report['split'] == 'train'
    )
    assert report['metrics'] == {} and len(report['names']) == 9
    cfg = Config.fromfile(files[0])
    model = build_model(cfg)
    model.load_state_dict(torch.load(files[1])['state_dict'])
    model.eval()
    from mmstepnet.datasets import Digits

    images = [torch.from_numpy(Digits('train')[i]['img']).permute(2, 0, 1) for i in range(30)]
    images = (torch.stack(images).float() - 78) / 96
    recorder = TrajectoryRecorder(model, step='unit', exclude_first=False)
    with torch.no_grad(), recorder as record:
        model(images)
    torch.testing.assert_close(read_samples(path)[0], record.nsi, rtol=1e-5, atol=0)


def test_some_pictures_are_spread_over_all(tool):
    whole = read_samples(tool())[0]
    some = tool('--max-samples', '4')
    assert read_report(some)['metrics'] == {}
    torch.testing.assert_close(read_samples(some)[0], whole[[0, 4, 8, 12]], rtol=1e-5, atol=0)
    more = tool('--max-samples', '99', '--blocks', 'backbone.layer3.*')
    torch.testing.assert_close(read_samples(more)[0], whole[:, 4:])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--split', 'train', '--blocks', 'layer9.*'], "blocks='layer9.*' matches no module"),
        (['--max-samples', '1'], '--max-samples must be at least 2, got 1'),
        (['--split', 'all'], 'invalid choice'),
    ],
)
def test_bad_arguments(tool, capsys, files, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        tool(*arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not (files[2] / 'work').exists()


def test_bad_checkpoints(tool, capsys, files):
    for path, message in (('none.pth', 'does not exist'), (files[0], 'is not a checkpoint')):
        with pytest.raises(SystemExit) as exit_info:
            tool(checkpoint=path)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def test_features_that_are_not_finite(tool, capsys, files):
    content = torch.load(files[1])
    content['state_dict']['backbone.layer2.1.bn2.weight'][0] = float('nan')
    torch.save(content, files[1])
    with pytest.raises(SystemExit):
        tool()
    assert 'block backbone.layer2.1, sample 0: features' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.smoke
def test_two_processes_measure_what_one_does(tool, files, monkeypatch):
    """13 pictures in batches of 4 on 2 processes: one is repeated to fill up, and cut again.

    In float64, since batches of other sizes are rounded otherwise by the network itself.
    """
    config, checkpoint, folder = files
    (folder / 'double_classifier.py').write_text(DOUBLE_CLASSIFIER)
    text = CONFIG.replace("['mmstepnet']", "['mmstepnet', 'double_classifier']")
    config.write_text(text.replace("'ImageClassifier'", "'DoubleClassifier'"))
    monkeypatch.syspath_prepend(str(folder))
    one, two = tool(), folder / 'two.json'
    path = f'{folder}{os.pathsep}{TOOLS.parent}'
    env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS='1')
    arguments = [TOOLS / 'launch.py', 2, TOOLS / 'analysis_tools' / 'stiffness.py', config]
    arguments += [checkpoint, '--launcher', 'pytorch', '--out', two, '--work-dir', folder / 'work2']
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    for mine, theirs in zip(read_samples(two), read_samples(one), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    tns = [read_report(path)['tns']['mean'] for path in (one, two)]
    assert tns[0] > 0.1
    assert tns[0] == pytest.approx(tns[1], rel=1e-12)
    assert {'delta.png', 'nsi.pdf'} < {p.name for p in two.with_suffix('').iterdir()}


def test_some_pictures_are_taken_from_the_configured_ones(tool):
    whole = read_samples(tool())[0]
    options = ('--max-samples', '3', '--cfg-options', 'val_dataloader.dataset.indices=[1,3,5,7,9]')
    some = tool(*options)
    torch.testing.assert_close(read_samples(some)[0], whole[[1, 5, 9]], rtol=1e-5, atol=0)
