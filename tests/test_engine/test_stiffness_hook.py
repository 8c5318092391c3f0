import copy
import json
import math

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

import mmstepnet  # noqa: F401
from mmstepnet.engine.hooks import StiffnessHook
from mmstepnet.stiffness import (
    TrajectoryRecorder,
    read_report,
    read_samples,
    total_neural_stiffness,
)

pytest.importorskip('mmpretrain')
pytest.importorskip('sklearn')

KEYS = {f'stiffness/{key}' for key in ('tns', 'tns_std_error', 'nsi_mean', 'nsi_max', 'proportion')}


def config(work_dir, hook=None, **kwargs):
    """A narrow StepResNet on 14 training and 11 test digits: no batch size divides both."""
    plugins = [
        dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), blocks='all', position='residual_step')
    ]
    data = dict(type='mmstepnet.Digits', pipeline=[dict(type='PackInputs')])

    def loader(split, size, batch_size):
        return dict(
            batch_size=batch_size,
            num_workers=0,
            dataset=dict(data, split=split, indices=size),
            sampler=dict(type='DefaultSampler', shuffle=split == 'train'),
        )

    cfg = dict(
        default_scope='mmpretrain',
        work_dir=str(work_dir),
        # Runners of the same name and second share a logger, and with it the first one's file.
        experiment_name=str(work_dir).replace('/', '_'),
        model=dict(
            type='ImageClassifier',
            backbone=dict(
                type='mmstepnet.StepResNetCifar',
                in_channels=1,
                depth=20,
                block='basic',
                widths=(4, 8, 8),
                plugins=plugins,
            ),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=8, topk=(1,)),
        ),
        data_preprocessor=dict(num_classes=10, mean=[78.0], std=[96.0], to_rgb=False),
        train_dataloader=loader('train', 14, 7),
        val_dataloader=loader('test', 11, 4),
        test_dataloader=loader('test', 11, 3),
        val_evaluator=dict(type='Accuracy', topk=1),
        test_evaluator=dict(type='Accuracy', topk=1),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
        val_cfg=dict(),
        test_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05)),
        custom_hooks=[dict(type='mmstepnet.StiffnessHook', figures=False, **(hook or {}))],
        randomness=dict(seed=0),
        log_level='WARNING',
    )
    cfg.update(kwargs)
    return Config(copy.deepcopy(cfg))


def run(cfg):
    runner = Runner.from_cfg(cfg)
    for module in runner.model.modules():  # away from zero-init, so that gates and blocks differ
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    for name, parameter in runner.model.named_parameters():
        if '.step.' in name:
            nn.init.normal_(parameter)
    return runner


@torch.no_grad()
def measure(model, dataset, **kwargs):
    """NSI of a whole data set in one batch, without runner, hook and metric."""
    model.eval()
    samples = [dataset[i] for i in range(len(dataset))]
    inputs = torch.stack([sample['inputs'] for sample in samples])
    inputs = model.data_preprocessor(dict(inputs=inputs))['inputs']
    with TrajectoryRecorder(model, **kwargs) as record:
        model(inputs)
    return record


@pytest.mark.parametrize('step', ['attention', 'unit'])
def test_validation_and_test_measure_what_a_recorder_does(tmp_path, step):
    runner = run(config(tmp_path, hook=dict(step=step)))
    for evaluate in (runner.val, runner.test):
        metrics = evaluate()
        assert set(metrics) == {*KEYS, 'accuracy/top1'}
        record = measure(runner.model, runner.val_dataloader.dataset, step=step)
        tns = total_neural_stiffness(record.nsi, record.stages)
        assert metrics['stiffness/tns'] == pytest.approx(tns.mean.item(), rel=1e-5)
        assert metrics['stiffness/tns_std_error'] == pytest.approx(tns.std_error.item(), rel=1e-5)
        assert metrics['stiffness/nsi_mean'] == pytest.approx(record.nsi.mean().item(), rel=1e-5)
        assert metrics['stiffness/nsi_max'] == pytest.approx(record.nsi.max().item(), rel=1e-5)
        means = torch.cat(
            [
                record.nsi[:, record.stages == s].mean(1, keepdim=True).expand(-1, n)
                for s, n in zip(*record.stages.unique(return_counts=True), strict=True)
            ],
            dim=1,
        )
        share = (record.nsi >= 1.1 * means).double().mean().item()
        assert metrics['stiffness/proportion'] == pytest.approx(share)

    for split in ('val', 'test'):
        path = tmp_path / 'stiffness' / f'{split}.json'
        report = read_report(path)
        assert report['tns']['mean'] == pytest.approx(tns.mean.item(), rel=1e-5)
        assert (report['step'], report['num_samples']) == (step, 11)
        assert report['metrics'] == {'accuracy/top1': metrics['accuracy/top1']}
        assert report['names'] == [f'backbone.layer{i}.{j}' for i in (1, 2, 3) for j in (1, 2)]
        assert report['dataset'] == 'Digits test (indices 11), 11 samples'
        nsi, dt = read_samples(path)
        torch.testing.assert_close(nsi, record.nsi, rtol=1e-5, atol=0)
        torch.testing.assert_close(dt, record.dt, rtol=1e-5, atol=0)


def test_training_logs_saves_the_best_and_reports_every_epoch(tmp_path):
    checkpoint = dict(type='CheckpointHook', save_best='stiffness/tns', rule='greater')
    cfg = config(tmp_path, default_hooks=dict(checkpoint=checkpoint))
    runner = run(cfg)
    runner.train()
    reports = [read_report(tmp_path / 'stiffness' / f'epoch_{i}.json') for i in (1, 2)]
    values = [report['tns']['mean'] for report in reports]
    assert values[0] != values[1]
    best = int(np.argmax(values)) + 1
    assert [p.name for p in tmp_path.glob('best*')] == [f'best_stiffness_tns_epoch_{best}.pth']
    scalars = [
        json.loads(line)
        for line in next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines()
    ]
    logged = [line['stiffness/tns'] for line in scalars if 'stiffness/tns' in line]
    assert logged == pytest.approx(values)


def test_figures_are_written_and_shown(tmp_path):
    runner = run(config(tmp_path, vis_backends=None, visualizer=None))
    hook = next(h for h in runner.hooks if isinstance(h, StiffnessHook))
    hook.figures = True
    shown = {}
    runner.visualizer.add_image = lambda name, image, step=0: shown.update({name: image})
    runner.val()
    names = {'delta', 'p_hat', 'nsi', 'step_size', 'nsi_step_size'}
    assert set(shown) == {f'stiffness/{name}' for name in names}
    assert all(image.dtype == np.uint8 and image.std() > 0 for image in shown.values())
    files = {p.name for p in (tmp_path / 'stiffness' / 'val').iterdir()}
    assert files == {f'{name}.{kind}' for name in names for kind in ('png', 'pdf')}


def test_interval_counts_validations_and_never_skips_the_last(tmp_path):
    train_cfg = dict(by_epoch=True, max_epochs=5, val_interval=1)
    run(config(tmp_path, hook=dict(interval=2), train_cfg=train_cfg)).train()
    names = {p.name for p in (tmp_path / 'stiffness').glob('*.json')}
    assert names == {'epoch_2.json', 'epoch_4.json', 'epoch_5.json'}


@pytest.mark.parametrize('save_best', ['stiffness/tns', ['accuracy/top1', 'stiffness/nsi_max']])
def test_the_best_cannot_be_sought_among_values_left_out(tmp_path, save_best):
    checkpoint = dict(type='CheckpointHook', save_best=save_best, rule='greater')
    runner = run(config(tmp_path, dict(interval=2), default_hooks=dict(checkpoint=checkpoint)))
    with pytest.raises(ValueError, match=r"interval must be 1 where save_best is 'stiffness/"):
        runner.train()
    assert not (tmp_path / 'stiffness').exists()


def test_iterations(tmp_path):
    train_cfg = dict(by_epoch=False, max_iters=3, val_interval=2)
    run(config(tmp_path, train_cfg=train_cfg)).train()
    assert {p.name for p in (tmp_path / 'stiffness').glob('*.json')} == {
        'iter_2.json',
        'iter_3.json',
    }


def test_ema_measures_the_averaged_weights(tmp_path):
    cfg = config(tmp_path)
    cfg.custom_hooks.insert(0, dict(type='EMAHook', momentum=0.3))
    runner = run(cfg)
    runner.train()
    ema = next(hook for hook in runner.hooks if hasattr(hook, 'ema_model')).ema_model.module
    dataset = runner.val_dataloader.dataset
    report = read_report(tmp_path / 'stiffness' / 'epoch_2.json')
    tns = {
        name: total_neural_stiffness(record.nsi, record.stages).mean.item()
        for name, record in (
            ('ema', measure(ema, dataset)),
            ('plain', measure(runner.model, dataset)),
        )
    }
    assert report['tns']['mean'] == pytest.approx(tns['ema'], rel=1e-5)
    assert abs(tns['ema'] - tns['plain']) > 1e-3 * tns['ema']
    assert all(module.recorder is None for module in ema.modules() if hasattr(module, 'recorder'))


def test_half_precision(tmp_path):
    full = run(config(tmp_path)).test()
    runner = run(config(tmp_path, test_cfg=dict(fp16=True)))
    half = runner.test()
    assert half['stiffness/tns'] == pytest.approx(full['stiffness/tns'], rel=0.1)
    assert half['stiffness/tns'] != full['stiffness/tns']


class Stop(Hook):
    """Ends a run in the middle of an evaluation."""

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        raise KeyboardInterrupt

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        steps = [m for m in runner.model.modules() if hasattr(m, 'recorder')]
        self.was_attached = any(step.recorder is not None for step in steps)


def test_an_interrupted_evaluation_leaves_nothing_attached(tmp_path):
    runner = run(config(tmp_path))
    stop = Stop()
    runner.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        runner.val()
    assert stop.was_attached
    assert all(m.recorder is None for m in runner.model.modules() if hasattr(m, 'recorder'))
    assert not any(m._forward_hooks for m in runner.model.modules())
    runner._hooks.remove(stop)
    with torch.no_grad():  # what was seen before the interruption is of another network now
        runner.model.backbone.layer1[1].bn2.weight.mul_(3)
    assert runner.val()['stiffness/tns'] == runner.val()['stiffness/tns']
    assert 'run_iter' not in vars(runner.val_loop)
    assert len(read_samples(tmp_path / 'stiffness' / 'val.json')[0]) == 11


def test_a_metric_of_the_evaluator_is_used(tmp_path):
    evaluator = [dict(type='Accuracy'), dict(type='mmstepnet.StiffnessMetric', step='unit')]
    runner = run(config(tmp_path, val_evaluator=evaluator))
    metrics = runner.val()
    assert set(metrics) > KEYS
    assert read_report(tmp_path / 'stiffness' / 'val.json')['step'] == 'unit'
    assert len(runner.val_evaluator.metrics) == 2


def test_a_metric_of_the_evaluator_knows_which_blocks(tmp_path):
    blocks = ['backbone.conv0', 'backbone.conv1']
    metric = dict(type='mmstepnet.StiffnessMetric', blocks=blocks)
    cfg = config(tmp_path, test_evaluator=[metric])
    cfg.custom_hooks = [dict(type='mmstepnet.StiffnessHook')]
    cfg.model.backbone = dict(type='LeNet5', num_classes=-1)
    cfg.model.pop('neck')
    with pytest.raises(ValueError, match=r"names \['backbone\.conv0', 'backbone\.conv1'\]"):
        Runner.from_cfg(cfg).test()


def test_evaluation_twice_does_not_add_up(tmp_path):
    runner = run(config(tmp_path))
    assert runner.test() == runner.test()
    assert len(runner.test_evaluator.metrics) == 2


def test_bad_features(tmp_path):
    runner = run(config(tmp_path))
    runner.model.backbone.layer2[1].step.step_size.register_forward_hook(
        lambda m, args, dt: dt * math.nan
    )
    with pytest.raises(ValueError, match=r'backbone\.layer2\.1, sample 0'):
        runner.val()
    seen = 0

    def spoil(module, args, dt):
        nonlocal seen
        seen += len(dt)
        if seen == 8:
            dt[2] = math.nan  # sample 6
        return dt

    runner = run(config(tmp_path, hook=dict(nan_policy='omit')))
    runner.model.backbone.layer3[1].step.step_size.register_forward_hook(spoil)
    runner.val()
    report = read_report(tmp_path / 'stiffness' / 'val.json')
    assert (report['num_samples'], report['num_omitted']) == (10, 1)
    record = measure(runner.model, runner.val_dataloader.dataset)
    nsi = read_samples(tmp_path / 'stiffness' / 'val.json')[0]
    keep = [i for i in range(11) if i != 6]
    torch.testing.assert_close(nsi, record.nsi[keep], rtol=1e-5, atol=0)


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match='interval'):
        StiffnessHook(interval=0)
    for thresholds in ((-1, 0), (0, math.nan), (math.inf, 0), (0,)):
        with pytest.raises(ValueError, match='thresholds'):
            StiffnessHook(thresholds=thresholds)
    for name in ('step', 'nan_policy'):
        with pytest.raises(ValueError, match=f"{name} must be .*'ignore'"):
            StiffnessHook(**{name: 'ignore'})
    with pytest.raises(TypeError, match='steps'):
        StiffnessHook(steps='unit')


def test_a_model_without_blocks_is_refused_before_training(tmp_path):
    cfg = config(tmp_path)
    cfg.model.backbone = dict(type='LeNet5', num_classes=-1)
    cfg.model.pop('neck')
    with pytest.raises(ValueError, match='no residual blocks'):
        Runner.from_cfg(cfg).train()


def test_stages_that_can_have_no_tns_are_said(tmp_path):
    cfg = config(tmp_path)
    cfg.model.backbone.depth = 14
    runner = run(cfg)
    assert runner.val()['stiffness/tns'] == 0
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'exclude_first=False records the first blocks too' in log


@pytest.mark.parametrize(
    ('hook', 'backbone', 'said'),
    [
        (None, dict(), True),
        ('SyncBuffersHook', dict(), False),
        (None, dict(norm_eval=True), False),  # StepNet's own norm is synchronised
        (None, dict(norm_eval=True, plugins=[dict(cfg=dict(type='mmstepnet.CBAM'))]), True),
        ('SyncBuffersHook', dict(plugins=[dict(cfg=dict(type='mmstepnet.CBAM'))]), False),
    ],
)
def test_drifting_statistics_are_said(tmp_path, hook, backbone, said, monkeypatch):
    cfg = config(tmp_path)
    cfg.model.backbone.update(backbone, widths=(16, 16, 16))
    cfg.model.head.in_channels = 16
    if hook:
        cfg.custom_hooks.append(dict(type=hook))
    runner = run(cfg)
    runner.model.eval()
    monkeypatch.setattr(type(runner), 'world_size', 2)
    next(h for h in runner.hooks if isinstance(h, StiffnessHook)).before_train(runner)
    log = ''.join(path.read_text() for path in tmp_path.glob('*/*.log'))
    assert ("add dict(type='SyncBuffersHook')" in log) == said


@pytest.mark.parametrize('seed', [7, None])
def test_a_report_names_the_seed_of_the_training(tmp_path, seed):
    runner = run(config(tmp_path / 'first'))
    path = tmp_path / 'trained.pth'
    meta = {} if seed is None else dict(seed=seed)
    torch.save(dict(state_dict=runner.model.state_dict(), meta=meta), path)
    cfg = config(tmp_path / 'second', load_from=str(path), randomness=dict(seed=3))
    Runner.from_cfg(cfg).test()
    report = read_report(tmp_path / 'second' / 'stiffness' / 'test.json')
    assert report.get('seed') == seed
    assert report['exclude_first'] is True


def test_an_evaluation_is_recorded_once(tmp_path):
    hooks = [
        dict(type='mmstepnet.StiffnessHook', figures=False, step=step)
        for step in ('attention', 'unit')
    ]
    with pytest.raises(ValueError, match='two StiffnessHooks'):
        Runner.from_cfg(config(tmp_path, custom_hooks=hooks)).val()
    metrics = [
        dict(type='mmstepnet.StiffnessMetric', step=step, prefix=step)
        for step in ('attention', 'unit')
    ]
    with pytest.raises(ValueError, match='two StiffnessMetrics'):
        Runner.from_cfg(config(tmp_path, val_evaluator=metrics)).val()
