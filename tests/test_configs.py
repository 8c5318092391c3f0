"""Every config parses, builds its model, predicts and takes a training step."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.registry import init_default_scope

import mmstepnet  # noqa: F401
from mmstepnet.registry import MODELS

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


def classification_batch(model):
    from mmpretrain.structures import DataSample

    size = getattr(model.backbone, 'img_size', 32)
    height, width = (size, size) if isinstance(size, int) else size
    channels = len(model.data_preprocessor.mean) if model.data_preprocessor._enable_normalize else 3
    return dict(
        inputs=torch.randint(0, 256, (2, channels, height, width), dtype=torch.uint8),
        data_samples=[DataSample().set_gt_label(label) for label in (0, 1)],
    )


@pytest.mark.parametrize('name', slow_but(CONFIGS, EVERYDAY))
def test_builds_predicts_and_trains(name):
    cfg = load(name)
    # Weights from the network are for training; what is tested here is the config.
    for part in (cfg.model, cfg.model.backbone):
        if 'Pretrained' in str(part.get('init_cfg')):
            part.init_cfg = None
    if 'data_preprocessor' in cfg:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    model = MODELS.build(dict(cfg.model, _scope_=cfg.default_scope))
    model.init_weights()
    if listed := LISTED.get(f'configs/{name}'):
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == listed['Metadata']['Parameters']
    is_detector = cfg.default_scope == 'mmdet'

    def batch():
        return detection_batch() if is_detector else classification_batch(model)

    model.eval()
    with torch.no_grad():
        predictions = model.test_step(batch())
    assert len(predictions) == 2
    if is_detector:
        assert all(torch.isfinite(p.pred_instances.bboxes).all() for p in predictions)
    else:
        assert np.allclose([p.pred_score.sum() for p in predictions], 1, atol=1e-5)

    model.train()
    losses = model(**model.data_preprocessor(batch(), training=True), mode='loss')
    total, _ = model.parse_losses(losses)
    assert torch.isfinite(total)
    total.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
