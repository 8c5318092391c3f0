import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmstepnet  # noqa: F401  (lets the safe loader read MMEngine's checkpoints)
from mmstepnet.engine.hooks import AtomicLocalBackend

TOOLS = Path(__file__).parents[2] / 'tools'


def weights(path):
    return torch.load(path)['state_dict']


def assert_same_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


def losses(work_dir):
    """Training loss by iteration, as the log has it."""
    rows = [
        json.loads(line)
        for path in work_dir.glob('*/vis_data/scalars.json')
        for line in path.read_text().splitlines()
    ]
    return {row['step']: row['loss'] for row in rows if 'loss' in row}


@pytest.fixture(scope='module')
def whole_run(toy_project, tmp_path_factory):
    """Four epochs without a break."""
    work_dir = tmp_path_factory.mktemp('whole') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        toy_project.call(patch, 'train', '--work-dir', work_dir)
    return work_dir


def killed_after(whole_run, work_dir, epochs):
    """The work directory of the same run, killed after some epochs."""
    work_dir.mkdir()
    for epoch in range(1, epochs + 1):
        shutil.copy(whole_run / f'epoch_{epoch}.pth', work_dir)
    (work_dir / 'last_checkpoint').write_text(str(work_dir / f'epoch_{epochs}.pth'))
    return work_dir


@pytest.mark.smoke
def test_resumed_run_equals_the_one_without_a_break(toy, whole_run, tmp_path, monkeypatch):
    work_dir = killed_after(whole_run, tmp_path / 'run', epochs=2)
    toy.call(monkeypatch, 'train', '--work-dir', work_dir, '--resume')

    assert_same_weights(whole_run / 'epoch_4.pth', work_dir / 'epoch_4.pth')
    all_losses, resumed = losses(whole_run), losses(work_dir)
    assert sorted(resumed) == list(range(13, 25))
    assert resumed == {step: all_losses[step] for step in resumed}
    optimizers = [
        torch.load(folder / 'epoch_4.pth')['optimizer']['state'] for folder in (whole_run, work_dir)
    ]
    for key, state in optimizers[0].items():
        assert torch.equal(state['momentum_buffer'], optimizers[1][key]['momentum_buffer'])


def test_epochs_draw_different_random_numbers(whole_run):
    """A seed that every epoch starts from again would repeat the augmentations."""
    values = list(losses(whole_run).values())
    assert len(set(values)) == len(values)


@pytest.mark.smoke
def test_resume_passes_over_a_truncated_checkpoint(toy, whole_run, tmp_path, monkeypatch, capsys):
    work_dir = killed_after(whole_run, tmp_path / 'run', epochs=3)
    newest = work_dir / 'epoch_3.pth'
    newest.write_bytes(newest.read_bytes()[:2000])
    capsys.readouterr()
    toy.call(monkeypatch, 'train', '--work-dir', work_dir, '--resume')

    assert 'epoch_3.pth is truncated: it ends after 2000 bytes' in capsys.readouterr().err
    assert_same_weights(whole_run / 'epoch_4.pth', work_dir / 'epoch_4.pth')


def evaluated(work_dir):
    """Epochs whose evaluation a work directory's logs hold, in order of writing."""
    logs = sorted(work_dir.glob('*/vis_data/scalars.json'))
    rows = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [row['step'] for row in rows if 'accuracy' in row]


@pytest.mark.parametrize('logged', [1, 2])
def test_an_evaluation_that_a_kill_prevented_is_made_up_for(
    toy, whole_run, tmp_path, monkeypatch, logged
):
    work_dir = killed_after(whole_run, tmp_path / 'run', epochs=2)
    (log,) = whole_run.glob('*/vis_data/scalars.json')
    lines = log.read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if 'accuracy' in line]
    copy = work_dir / '20200101_000000' / 'vis_data' / 'scalars.json'
    copy.parent.mkdir(parents=True)
    copy.write_text(''.join(lines[: ends[logged - 1] + 1]))
    toy.call(monkeypatch, 'train', '--work-dir', work_dir, '--resume')
    assert evaluated(work_dir) == [1, 2, 3, 4]
    assert_same_weights(whole_run / 'epoch_4.pth', work_dir / 'epoch_4.pth')


def test_without_settings_of_checkpoints_every_epoch_is_saved(toy, tmp_path, monkeypatch):
    derived_config(
        toy,
        tmp_path,
        monkeypatch,
        "default_hooks = dict(_delete_=True, logger=dict(type='LoggerHook'))",
    )
    run = tmp_path / 'run'
    toy.call(monkeypatch, 'train', '--work-dir', run, '--cfg-options', 'train_cfg.max_epochs=2')
    assert {path.name for path in run.glob('epoch_*.pth')} == {'epoch_1.pth', 'epoch_2.pth'}


LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], 'w')
fcntl.lockf(file, fcntl.LOCK_EX)
print('locked', flush=True)
time.sleep(600)
"""


def test_a_second_training_in_a_work_dir_is_refused(toy, tmp_path, monkeypatch, capsys):
    command = [sys.executable, '-c', LOCK, str(tmp_path / '.training')]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == 'locked\n'
        with pytest.raises(SystemExit) as ended:
            toy.call(monkeypatch, 'train', '--work-dir', tmp_path)
        other.kill()
    assert ended.value.code == 2
    assert f'another training is running in {tmp_path}' in capsys.readouterr().err
    # The lock has ended with its process.
    toy.call(
        monkeypatch, 'train', '--work-dir', tmp_path, '--cfg-options', 'train_cfg.max_epochs=1'
    )
    assert (tmp_path / 'epoch_1.pth').is_file()


@pytest.mark.parametrize('tool', ['train', 'test'])
def test_detectors_are_refused_a_gpu_that_mmcv_was_not_compiled_for(
    toy, whole_run, tmp_path, monkeypatch, capsys, tool
):
    pytest.importorskip('mmcv.ops')
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    monkeypatch.setattr('mmcv.ops.get_compiling_cuda_version', lambda: 'not available')
    derived_config(toy, tmp_path, monkeypatch, "default_scope = 'mmdet'")
    checkpoint = [whole_run / 'epoch_4.pth'] if tool == 'test' else []
    with pytest.raises(SystemExit) as ended:
        toy.call(monkeypatch, tool, *checkpoint, '--work-dir', tmp_path / 'run')
    assert ended.value.code == 2
    assert 'compiled for the CPU: install nvcc' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def test_resume_in_an_empty_work_dir_starts_from_the_beginning(
    toy, whole_run, tmp_path, monkeypatch, capsys
):
    seed = torch.load(whole_run / 'epoch_1.pth')['meta']['seed']
    toy.call(
        monkeypatch,
        'train',
        *('--work-dir', tmp_path / 'run', '--resume'),
        *('--cfg-options', f'randomness.seed={seed}', 'train_cfg.max_epochs=1'),
    )
    assert 'training starts from the beginning' in capsys.readouterr().err
    assert_same_weights(whole_run / 'epoch_1.pth', tmp_path / 'run' / 'epoch_1.pth')


def derived_config(toy, tmp_path, monkeypatch, text):
    """Let the tools run on a config that changes the toy's."""
    config = tmp_path / 'derived.py'
    config.write_text(f'_base_ = {str(toy.config)!r}\n{text}\n')
    monkeypatch.setattr(toy, 'config', config)


def test_iteration_based_run_resumes_exactly(toy, tmp_path, monkeypatch):
    derived_config(
        toy,
        tmp_path,
        monkeypatch,
        "train_dataloader = dict(sampler=dict(type='InfiniteSampler'))\n"
        'train_cfg = dict(_delete_=True, by_epoch=False, max_iters=10)\n'
        'param_scheduler = dict(by_epoch=False)\n'
        'default_hooks = dict(checkpoint=dict(by_epoch=False, interval=5))\n',
    )
    first, second = tmp_path / 'first', tmp_path / 'second'
    toy.call(monkeypatch, 'train', '--work-dir', first, '--no-validate')
    second.mkdir()
    shutil.copy(first / 'iter_5.pth', second)
    toy.call(monkeypatch, 'train', '--work-dir', second, '--no-validate', '--resume')
    assert_same_weights(first / 'iter_10.pth', second / 'iter_10.pth')


def test_a_failed_write_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    backend = AtomicLocalBackend()
    path = tmp_path / 'folder' / 'epoch_1.pth'
    backend.put(b'first', str(path))

    def full_disk(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full_disk)
    with pytest.raises(OSError, match='No space left'):
        backend.put(b'second', str(path))
    assert path.read_bytes() == b'first'
    assert [p.name for p in path.parent.iterdir()] == ['epoch_1.pth']


@pytest.mark.smoke
def test_old_checkpoints_go_after_the_new_one_is_there(toy, tmp_path, monkeypatch):
    work_dir = tmp_path / 'run'
    there_before_writing = []
    put = AtomicLocalBackend.put

    def record(self, obj, filepath):
        there_before_writing.append({p.name for p in work_dir.glob('*.pth')})
        put(self, obj, filepath)

    monkeypatch.setattr(AtomicLocalBackend, 'put', record)
    hook = 'default_hooks.checkpoint'
    toy.call(
        monkeypatch,
        'train',
        *('--work-dir', work_dir, '--cfg-options'),
        *(f'{hook}.max_keep_ckpts=1', f'{hook}.save_best=accuracy', f'{hook}.rule=greater'),
    )
    assert there_before_writing[0] == set()
    for names in there_before_writing[1:]:
        assert any(name.startswith('epoch_') for name in names)
    left = {p.name for p in work_dir.glob('*.pth')}
    assert 'epoch_4.pth' in left
    assert len([name for name in left if name.startswith('epoch_')]) == 1
    assert len([name for name in left if name.startswith('best_')]) == 1


def test_the_best_by_each_of_two_metrics(toy, tmp_path, monkeypatch):
    derived_config(
        toy,
        tmp_path,
        monkeypatch,
        "val_evaluator = [dict(type='ToyAccuracy', prefix=p) for p in ('one', 'two')]\n"
        "default_hooks = dict(checkpoint=dict(max_keep_ckpts=1, rule='greater',\n"
        "                                     save_best=['one/accuracy', 'two/accuracy']))\n",
    )
    run = tmp_path / 'run'
    toy.call(monkeypatch, 'train', '--work-dir', run)
    (log,) = run.glob('*/vis_data/scalars.json')
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    expected = {'epoch_4.pth'}
    for name in ('one', 'two'):
        found = {row['step']: row[f'{name}/accuracy'] for row in rows if f'{name}/accuracy' in row}
        # The first of several that are equal.
        best = max(found, key=lambda epoch: (found[epoch], -epoch))
        expected.add(f'best_{name}_accuracy_epoch_{best}.pth')
    assert {path.name for path in run.glob('*.pth')} == expected


def refused(toy, monkeypatch, capsys, tool, *arguments):
    """The message with which a tool ends, after a look that it has touched nothing."""
    work_dir = toy.config.parent / 'must not appear'
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        toy.call(monkeypatch, tool, '--work-dir', work_dir, *arguments)
    assert exit_info.value.code == 2
    assert not work_dir.exists()
    message = capsys.readouterr().err.strip()
    assert message.startswith('error: ')
    assert '\n' not in message
    return message


@pytest.mark.parametrize('tool', ['train', 'test'])
@pytest.mark.parametrize('inside', ['', 'folder'])
def test_work_dir_that_can_not_be_made_is_refused(
    toy, whole_run, tmp_path, monkeypatch, capsys, tool, inside
):
    (tmp_path / 'file').write_text('kept')
    work_dir = tmp_path / 'file' / inside
    checkpoint = [whole_run / 'epoch_4.pth'] if tool == 'test' else []
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        toy.call(monkeypatch, tool, *checkpoint, '--work-dir', work_dir)
    assert exit_info.value.code == 2
    assert f'error: folder {work_dir} can not be made: ' in capsys.readouterr().err
    assert (tmp_path / 'file').read_text() == 'kept'


@pytest.mark.parametrize('tool', ['train', 'test'])
@pytest.mark.parametrize(
    ('setting', 'message'),
    [('train_cfg', 'it must be KEY=VALUE'), ('a=[1,(2]', 'Imbalanced brackets')],
)
def test_malformed_setting_is_refused(toy, monkeypatch, capsys, tool, setting, message):
    checkpoint = ['x.pth'] if tool == 'test' else []
    with pytest.raises(SystemExit) as exit_info:
        toy.call(monkeypatch, tool, *checkpoint, '--cfg-options', 'b=1', setting)
    assert exit_info.value.code == 2
    assert f'error: --cfg-options {setting}: {message}' in capsys.readouterr().err


@pytest.fixture
def bad_checkpoints(whole_run, tmp_path):
    good = (whole_run / 'epoch_4.pth').read_bytes()
    (tmp_path / 'truncated.pth').write_bytes(good[: len(good) // 2])
    (tmp_path / 'empty.pth').write_bytes(b'')
    (tmp_path / 'text.pth').write_text('not a checkpoint')
    torch.save([1, 2], tmp_path / 'list.pth')
    torch.save({'state_dict': {'w': torch.ones(1)}, 'run': os.system}, tmp_path / 'unsafe.pth')
    return tmp_path


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('missing', 'does not exist'),
        ('truncated', 'is truncated: it ends after'),
        ('empty', 'is truncated: it ends after 0 bytes'),
        ('text', 'is not a checkpoint, or is damaged'),
        ('list', 'no state dict in a list'),
        ('unsafe', 'holds a posix.system, which torch does not load safely'),
    ],
)
@pytest.mark.smoke
def test_unusable_checkpoints(toy, bad_checkpoints, monkeypatch, capsys, name, message):
    path = bad_checkpoints / f'{name}.pth'
    assert message in refused(toy, monkeypatch, capsys, 'test', path)
    assert message in refused(toy, monkeypatch, capsys, 'train', '--resume', path)
    load_from = ('--no-validate', '--cfg-options', f'load_from={path}')
    assert message in refused(toy, monkeypatch, capsys, 'train', *load_from)


def test_checkpoint_of_another_network(toy, whole_run, tmp_path, monkeypatch, capsys):
    path = whole_run / 'epoch_4.pth'
    wider = ('--cfg-options', 'model.width=16')
    expected = '3 of another shape (first: backbone.weight (8, 4) instead of (16, 4))'
    assert expected in refused(toy, monkeypatch, capsys, 'test', path, *wider)
    assert expected in refused(toy, monkeypatch, capsys, 'train', '--resume', path, *wider)
    message = refused(
        toy, monkeypatch, capsys, 'train', '--no-validate', *wider, f'load_from={path}'
    )
    assert 'of another backbone than the config: 2 of another shape' in message

    deeper = torch.load(path)
    deeper['state_dict']['backbone.layer4.weight'] = torch.ones(1)
    torch.save(deeper, tmp_path / 'deeper.pth')
    message = refused(toy, monkeypatch, capsys, 'test', tmp_path / 'deeper.pth')
    assert '1 not in the model (first: backbone.layer4.weight)' in message


def test_weights_without_optimizer_can_not_be_resumed(
    toy, whole_run, tmp_path, monkeypatch, capsys
):
    torch.save({'state_dict': weights(whole_run / 'epoch_4.pth')}, tmp_path / 'slim.pth')
    message = refused(toy, monkeypatch, capsys, 'train', '--resume', tmp_path / 'slim.pth')
    assert 'holds no optimizer state' in message


def test_resume_with_another_total_batch_size(toy, whole_run, monkeypatch, capsys):
    message = refused(
        toy,
        monkeypatch,
        capsys,
        'train',
        *('--resume', whole_run / 'epoch_2.pth'),
        *('--cfg-options', 'train_dataloader.batch_size=4'),
    )
    assert 'was written with 1 processes x 2 samples, this run has 1 x 4' in message


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--amp'], '--amp needs a GPU'),
        (['--launcher', 'pytorch'], 'without RANK, LOCAL_RANK, WORLD_SIZE'),
        (['--cfg-options', 'model.widht=4'], "unexpected keyword argument 'widht'"),
        (['--cfg-options', 'model.type=Nothing'], 'Nothing is not in the mmengine::model registry'),
        (['--cfg-options', 'train_dataloader=None'], 'has no `train_dataloader`'),
    ],
)
def test_bad_settings(toy, monkeypatch, capsys, arguments, message):
    for name in ('RANK', 'WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert message in refused(toy, monkeypatch, capsys, 'train', '--no-validate', *arguments)


def test_auto_scale_lr_without_a_base(toy, tmp_path, monkeypatch, capsys):
    derived_config(toy, tmp_path, monkeypatch, 'auto_scale_lr = dict(_delete_=True)')
    message = refused(toy, monkeypatch, capsys, 'train', '--auto-scale-lr')
    assert 'needs auto_scale_lr.base_batch_size' in message


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (None, 'does not exist'),
        ('model = dict(', 'SyntaxError'),
        ("_base_ = 'nowhere.py'", 'nowhere.py'),
        ('x = 1', 'has no `model`'),
    ],
)
def test_unusable_configs(toy, tmp_path, monkeypatch, capsys, text, message):
    config = tmp_path / 'config.py'
    if text is not None:
        config.write_text(text)
    monkeypatch.setattr(toy, 'config', config)
    assert message in refused(toy, monkeypatch, capsys, 'train', '--no-validate')


def test_flags_reach_the_config(toy, tmp_path, monkeypatch):
    work_dir = tmp_path / 'run'
    toy.call(
        monkeypatch,
        'train',
        *('--work-dir', work_dir, '--auto-scale-lr', '--no-validate', '--no-pin-memory'),
        *('--cfg-options', 'train_cfg.max_epochs=1'),
    )
    rows = [
        json.loads(line)
        for path in work_dir.glob('*/vis_data/scalars.json')
        for line in path.read_text().splitlines()
    ]
    assert rows[0]['lr'] == pytest.approx(0.2)  # base batch size 1, batch size 2
    assert not any('accuracy' in row for row in rows)
    dumped = (work_dir / toy.config.name).read_text()
    assert 'pin_memory=False' in dumped
    assert "type='mmstepnet.AtomicCheckpointHook'" in dumped


def test_test_writes_metrics(toy, whole_run, tmp_path, monkeypatch):
    out = tmp_path / 'metrics.json'
    toy.call(
        monkeypatch,
        'test',
        whole_run / 'epoch_4.pth',
        *('--work-dir', tmp_path / 'run', '--out', out, '--out-item', 'metrics'),
    )
    accuracy = json.loads(out.read_text())['accuracy']
    # Eight of twelve or more: the augmentation can turn a sample near the border.
    assert accuracy >= 8 / 12


@pytest.fixture(scope='module')
def digits_set(tmp_path_factory):
    """A digits detection set of 8 training and 5 validation pictures."""
    folder = tmp_path_factory.mktemp('data') / 'digits'
    converter = TOOLS / 'dataset_converters' / 'digits2coco.py'
    command = [sys.executable, converter, '--out', folder, '--train', 8, '--val', 5]
    env = {**os.environ, 'PYTHONPATH': str(TOOLS.parent)}
    subprocess.run([str(word) for word in command], check=True, env=env, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.smoke
def test_main_job(toy, digits_set, tmp_path, monkeypatch, load_tool):
    """The digits detector: one process, two, resume, test, stiffness, demo, DetInferencer."""
    pytest.importorskip('mmcv.ops')
    config = TOOLS.parent / 'configs' / 'digits' / 'faster_rcnn_r18_stepnet_digits.py'
    splits = ('train', 'val', 'test')
    options = [
        '--cfg-options',
        'train_dataloader.batch_size=2',
        'default_hooks.logger.interval=1',
        'default_hooks.checkpoint.max_keep_ckpts=-1',
        *(f'{split}_dataloader.dataset.data_root={digits_set}/' for split in splits),
        *(f'{s}_evaluator.ann_file={digits_set}/annotations/val.json' for s in splits[1:]),
    ]

    def run(script, *arguments):
        code, output = toy.run(script, config, *arguments, *options)
        assert code == 0, output

    one = tmp_path / 'one'
    options.append('train_cfg.max_epochs=1')
    run('train.py', '--work-dir', one, '--no-validate')
    assert sorted(losses(one)) == [1, 2, 3, 4]

    whole, broken = tmp_path / 'two', tmp_path / 'two, broken off'
    options[-1] = 'train_cfg.max_epochs=2'
    run('dist_train.sh', 2, '--work-dir', whole)
    killed_after(whole, broken, epochs=1)
    run('dist_train.sh', 2, '--work-dir', broken, '--resume')
    checkpoint = whole / 'epoch_2.pth'
    assert_same_weights(checkpoint, broken / 'epoch_2.pth')
    all_losses, resumed = losses(whole), losses(broken)
    assert sorted(resumed) == [3, 4]
    assert resumed == {step: all_losses[step] for step in resumed}

    out = ('--out-item', 'metrics', '--work-dir', tmp_path / 'test', '--out')
    run('test.py', checkpoint, *out, tmp_path / 'one.json')
    run('dist_test.sh', checkpoint, 2, *out, tmp_path / 'two.json')
    metrics = [json.loads((tmp_path / f'{name}.json').read_text()) for name in ('one', 'two')]
    assert metrics[0]['coco/bbox_mAP'] == metrics[1]['coco/bbox_mAP']

    report = tmp_path / 'stiffness.json'
    as_the_hook = ('--include-first', '--no-figures')
    run('analysis_tools/stiffness.py', checkpoint, *as_the_hook, *out[2:], report)
    assert metrics[0]['stiffness/tns'] > 0
    assert json.loads(report.read_text())['tns']['mean'] == pytest.approx(
        metrics[0]['stiffness/tns'], rel=1e-5
    )

    picture = sorted((digits_set / 'val').iterdir())[0]
    demo = (picture, config, checkpoint, '--out-dir', tmp_path / 'demo', '--device', 'cpu')
    monkeypatch.setattr(sys, 'argv', ['image_demo.py', *map(str, demo)])
    load_tool('image_demo').main()
    assert (tmp_path / 'demo' / 'vis' / picture.name).is_file()
    saved = json.loads((tmp_path / 'demo' / 'preds' / f'{picture.stem}.json').read_text())

    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(str(config), weights=str(checkpoint), device='cpu')
    (prediction,) = inferencer(str(picture))['predictions']
    assert prediction['scores'] == pytest.approx(saved['scores'], rel=1e-5)
    assert prediction['labels'] == saved['labels']


NEW_STYLE = """
from mmengine.dataset import DefaultSampler, default_collate
from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, TestLoop, ValLoop
from mmpretrain.datasets import PackInputs
from mmpretrain.evaluation import Accuracy
from mmpretrain.models import (
    ClsDataPreprocessor,
    GlobalAveragePooling,
    ImageClassifier,
    LinearClsHead,
)
from torch.optim import SGD

from mmstepnet.datasets import Digits
from mmstepnet.models.backbones import StepResNetCifar

default_scope = None
data_preprocessor = dict(type=ClsDataPreprocessor, mean=[50.0], std=[80.0])
model = dict(
    type=ImageClassifier,
    backbone=dict(type=StepResNetCifar, depth=20, block='basic', in_channels=1),
    neck=dict(type=GlobalAveragePooling),
    head=dict(type=LinearClsHead, num_classes=10, in_channels=64),
)
pipeline = [dict(type=PackInputs)]
loader = dict(batch_size=50, num_workers=0, collate_fn=dict(type=default_collate))
train_dataloader = dict(
    loader,
    sampler=dict(type=DefaultSampler, shuffle=True),
    dataset=dict(type=Digits, split='train', train_per_class=5, pipeline=pipeline),
)
val_dataloader = dict(
    loader,
    sampler=dict(type=DefaultSampler, shuffle=False),
    dataset=dict(type=Digits, split='test', pipeline=pipeline),
)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type=Accuracy, topk=(1,))
optim_wrapper = dict(optimizer=dict(type=SGD, lr=0.1))
train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=1)
val_cfg = dict(type=ValLoop)
test_cfg = dict(type=TestLoop)
default_hooks = dict(checkpoint=dict(type=CheckpointHook))
"""


def test_a_new_style_config_is_trained_resumably_and_tested(toy, tmp_path):
    pytest.importorskip('mmpretrain')
    config, run = tmp_path / 'new style.py', tmp_path / 'run'
    config.write_text(NEW_STYLE)
    code, output = toy.run('train.py', config, '--work-dir', run)
    assert code == 0, output
    assert 'AtomicCheckpointHook' in output
    code, output = toy.run('test.py', config, run / 'epoch_1.pth', '--work-dir', tmp_path / 'test')
    assert code == 0, output
    assert 'accuracy/top1' in output
