"""Every config parses, builds its runner, predicts and takes a training step."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import DATASETS, RUNNERS, init_default_scope
from mmengine.runner import Runner
from PIL import Image

import mmstepnet  # noqa: F401

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[1] / 'configs'
CONFIGS = sorted(
    p.relative_to(ROOT).as_posix() for p in ROOT.rglob('*.py') if '_base_' not in p.parts
)
METAFILES = {p: yaml.safe_load(p.read_text()) for p in sorted(ROOT.glob('*/metafile.yml'))}
LISTED = {model['Config']: model for file in METAFILES.values() for model in file['Models']}
EVERYDAY = ('digits/faster_rcnn_r18_stepnet_digits.py',)


def slow_but(names, everyday):
    return [n if n in everyday else pytest.param(n, marks=pytest.mark.slow) for n in names]


def load(name):
    cfg = Config.fromfile(ROOT / name)
    init_default_scope(cfg.default_scope)
    return cfg


@pytest.mark.parametrize('name', CONFIGS)
def test_parses_and_names_its_imports(name):
    cfg = load(name)
    assert cfg.default_scope in ('mmdet', 'mmpretrain')
    assert 'mmstepnet' in cfg.custom_imports.imports
    assert cfg.custom_imports.allow_failed_imports is False
    if listed := LISTED.get(f'configs/{name}'):
        assert listed['Metadata']['Epochs'] == cfg.train_cfg.max_epochs


def test_metafiles_list_every_config_of_their_folders():
    index = yaml.safe_load((ROOT.parent / 'model-index.yml').read_text())
    assert index['Import'] == [p.relative_to(ROOT.parent).as_posix() for p in METAFILES]
    for path, file in METAFILES.items():
        folder = path.parent.relative_to(ROOT.parent)
        configs = [f'{folder}/{p.name}' for p in sorted(path.parent.glob('*.py'))]
        assert [model['Config'] for model in file['Models']] == configs
        assert [model['Name'] for model in file['Models']] == [Path(c).stem for c in configs]
        collections = {collection['Name'] for collection in file['Collections']}
        assert {model['In Collection'] for model in file['Models']} == collections


def detection_batch():
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    inputs, samples = [], []
    for size in ((64, 96), (64, 64)):
        inputs.append(torch.randint(0, 256, (3, *size), dtype=torch.uint8))
        sample = DetDataSample()
        sample.set_metainfo(
            dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0), img_id=0)
        )
        boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
        mask = np.zeros((1, *size), np.uint8)
        mask[:, 4:40, 4:40] = 1
        sample.gt_instances = InstanceData(
            bboxes=boxes, labels=torch.zeros(1, dtype=torch.long), masks=BitmapMasks(mask, *size)
        )
        sample.ignored_instances = InstanceData(
            bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long)
        )
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


def stand_in(cfg, folder):
    """A config's data set with its own pipeline, whose pictures are noise."""
    if cfg.type == 'mmstepnet.Digits':
        return DATASETS.build(cfg)
    dataset = DATASETS.build(dict(cfg, lazy_init=True))
    size = 96 if 'STL10' in cfg.type else 32
    picture = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    path = folder / 'noise.png'
    Image.fromarray(picture).save(path)
    sample = dict(img=picture, img_path=str(path), img_id=0, height=size, width=size, instances=[])
    innermost = dataset
    while hasattr(innermost, 'dataset'):
        innermost = innermost.dataset
    innermost.load_data_list = lambda: [dict(sample, gt_label=i % 2) for i in range(16)]
    innermost.serialize_data, innermost.filter_cfg = False, None
    dataset.full_init()
    return dataset


@pytest.fixture
def runner_of(tmp_path, monkeypatch):
    """The runner of a config as ``tools/train.py`` makes it, on noise and without downloads."""
    # What AMP needs a GPU for is left out by its gradient scaler on the CPU.
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(Runner, '_log_env', lambda self, env: None)

    def runner_of(cfg):
        for part in (cfg.model, cfg.model.backbone):
            if 'Pretrained' in str(part.get('init_cfg')):
                part.init_cfg = None
        cfg.work_dir = str(tmp_path)
        for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
            for metric in evaluator if isinstance(evaluator, list) else [evaluator]:
                # It is read when the metric is built.
                metric.pop('ann_file', None)
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
        for split in ('train', 'val', 'test'):
            loader = cfg[f'{split}_dataloader']
            loader.update(num_workers=0, batch_size=2, persistent_workers=False)
            if cfg.default_scope == 'mmpretrain':
                loader.setdefault('collate_fn', dict(type='default_collate'))
            loader = dict(loader, dataset=stand_in(loader.dataset, tmp_path))
            setattr(runner, f'_{split}_dataloader', runner.build_dataloader(loader))
        return runner

    return runner_of


@pytest.mark.parametrize('name', slow_but(CONFIGS, EVERYDAY))
def test_its_runner_predicts_and_takes_a_training_step(name, runner_of):
    cfg = load(name)
    runner = runner_of(cfg)
    model = runner.model
    model.init_weights()
    if listed := LISTED.get(f'configs/{name}'):
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == listed['Metadata']['Parameters']
    is_detector = cfg.default_scope == 'mmdet'

    def batch(loop):
        return detection_batch() if is_detector else next(iter(loop.dataloader))

    model.eval()
    for loop in (runner.val_loop, runner.test_loop):
        with torch.no_grad():
            predictions = model.test_step(batch(loop))
        assert len(predictions) == 2
        if is_detector:
            assert all(torch.isfinite(p.pred_instances.bboxes).all() for p in predictions)
        else:
            assert np.allclose([p.pred_score.sum() for p in predictions], 1, atol=1e-5)

    runner.optim_wrapper = optimizer = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.train_loop  # noqa: B018  (schedulers take their end from it)
    schedulers = runner.build_param_scheduler(runner.param_schedulers or [])
    before = {key: value.clone() for key, value in model.named_parameters()}
    model.train()
    data = model.data_preprocessor(batch(runner.train_loop), training=True)
    loss, _ = model.parse_losses(model(**data, mode='loss'))
    assert torch.isfinite(loss)
    optimizer.backward(loss)
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    assert not [key for key, value in trained.items() if value.grad is None]
    assert all(rate > 0 for rates in optimizer.get_lr().values() for rate in rates)
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    assert any(not torch.equal(value, before[key]) for key, value in trained.items())
    assert all(torch.isfinite(value).all() for value in trained.values())
