import json
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DefaultScope
from PIL import Image

pytest.importorskip('mmdet')

from mmdet.registry import DATASETS

CONFIGS = Path(__file__).parents[2] / 'configs' / '_base_' / 'datasets'


@pytest.mark.parametrize(
    'name, folder, size, category',
    [('digits', 'train', (64, 64), 8), ('bccd', 'JPEGImages', (640, 480), 2)],
)
def test_boxes_follow_the_picture(tmp_path, name, folder, size, category):
    """Training boxes are scaled with the picture, those for evaluation stay as they are."""
    cfg = Config.fromfile(CONFIGS / f'{name}_detection.py')
    content = dict(
        images=[dict(id=1, file_name='a.png', width=size[0], height=size[1])],
        annotations=[
            dict(id=1, image_id=1, category_id=category, bbox=[8, 6, 20, 30], area=600, iscrowd=0)
        ],
        categories=[dict(id=i, name=c) for i, c in enumerate(cfg.metainfo.classes, 1)],
    )
    for path in (tmp_path / 'annotations', tmp_path / folder, tmp_path / 'val'):
        path.mkdir()
    picture = Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8))
    picture.save(tmp_path / folder / 'a.png')
    picture.save(tmp_path / 'val' / 'a.png')
    for split in ('train', 'val'):
        (tmp_path / 'annotations' / f'{split}.json').write_text(json.dumps(content))

    train, val = cfg.train_dataloader.dataset, cfg.val_dataloader.dataset
    train.pipeline = [step for step in train.pipeline if step.type != 'RandomFlip']
    train.data_root = val.data_root = f'{tmp_path}/'
    with DefaultScope.overwrite_default_scope('mmdet'):
        trained, evaluated = DATASETS.build(train)[0], DATASETS.build(val)[0]
    factor = {'digits': 2, 'bccd': 0.5}[name]
    box = np.array([[8, 6, 28, 36]])
    for item, scale in ((trained, factor), (evaluated, 1)):
        assert tuple(item['inputs'].shape[:0:-1]) == tuple(int(edge * factor) for edge in size)
        truth = item['data_samples'].gt_instances
        assert np.allclose(truth.bboxes.tensor, box * scale)
        assert truth.labels.tolist() == [category - 1]
    assert np.allclose(evaluated['data_samples'].scale_factor, factor)
