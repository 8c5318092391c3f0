import json
import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from PIL import Image
from torch import nn

from mmstepnet.utils.data_check import check_class_counts, check_dataset_cfg, fetch_data

pytest.importorskip('mmdet')


@pytest.fixture
def dataset(tmp_path):
    """The config of a whole data set of two pictures."""
    images = [dict(id=i, file_name=f'{i}.png', width=8, height=8) for i in (1, 2)]
    content = dict(
        categories=[dict(id=1, name='cell')],
        images=images,
        annotations=[dict(id=5, image_id=2, category_id=1, bbox=[1, 1, 4, 4], area=16, iscrowd=0)],
    )
    (tmp_path / 'img').mkdir()
    for image in images:
        picture = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
        picture.save(tmp_path / 'img' / image['file_name'])
    (tmp_path / 'ann.json').write_text(json.dumps(content))
    return dict(
        type='CocoDataset',
        data_root=f'{tmp_path}/',
        ann_file='ann.json',
        data_prefix=dict(img='img/'),
        metainfo=dict(classes=('cell',)),
    )


def config(dataset, **kwargs):
    loader = dict(batch_size=1, dataset=dataset)
    return Config(dict(default_scope='mmdet', train_dataloader=loader, **kwargs))


def change(tmp_path, key, index, **values):
    content = json.loads((tmp_path / 'ann.json').read_text())
    content[key][index].update(values)
    (tmp_path / 'ann.json').write_text(json.dumps(content))


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(
        'mmstepnet.utils.data_check.print_log',
        lambda message, logger, level: messages.append((message, level)),
    )
    return messages


@pytest.mark.parametrize(
    'wrap',
    [
        lambda d: d,
        lambda d: dict(type='RepeatDataset', times=2, dataset=d),
        lambda d: dict(
            type='ConcatDataset', datasets=[d, dict(type='ClassBalancedDataset', dataset=d)]
        ),
        lambda d: [d, d],
    ],
)
def test_finds_data_sets_in_any_nesting(dataset, tmp_path, wrap, warnings):
    check_dataset_cfg(config(wrap(dataset)))
    (tmp_path / 'img' / '2.png').unlink()
    with pytest.raises(ValueError, match=r'ann.json: image 2: .*2.png: No such file'):
        check_dataset_cfg(config(wrap(dataset)))
    assert warnings == []


def test_missing_coco_says_what_to_download_in_one_line():
    cfg = config(
        dict(
            type='CocoDataset',
            data_root='data/no/coco/',
            ann_file='annotations/instances_train2017.json',
            data_prefix=dict(img='train2017/'),
        )
    )
    with pytest.raises(FileNotFoundError) as caught:
        check_dataset_cfg(cfg)
    message = str(caught.value)
    assert message.startswith('data/no/coco/ is missing: download train2017.zip')
    assert 'https://cocodataset.org/#download' in message and '\n' not in message


@pytest.mark.parametrize(
    'root, advice',
    [
        ('x/digits_coco', 'digits2coco.py'),
        ('x/bccd/', 'voc2coco.py'),
        ('x/mine', 'change data_root'),
    ],
)
def test_missing_folders_say_how_to_get_them(root, advice):
    with pytest.raises(FileNotFoundError, match=advice):
        check_dataset_cfg(config(dict(type='CocoDataset', data_root=root, ann_file='a.json')))


def test_missing_annotation_file_is_named(dataset):
    dataset['ann_file'] = 'other.json'
    with pytest.raises(FileNotFoundError, match=r'other.json \(of the data set .*is missing'):
        check_dataset_cfg(config(dataset))


def test_fatal_problems_are_counted(dataset, tmp_path):
    change(tmp_path, 'annotations', 0, category_id=9)
    with pytest.raises(
        ValueError, match=r'annotation 5 of image 2 \(2.png\): category id 9'
    ) as caught:
        check_dataset_cfg(config(dataset))
    assert 'more errors' not in str(caught.value)
    (tmp_path / 'img' / '1.png').unlink()
    with pytest.raises(ValueError, match=r'\(1 more errors, list them with: python tools'):
        check_dataset_cfg(config(dataset))


def test_boxes_that_are_left_out_are_named_in_the_log(dataset, tmp_path, warnings):
    change(tmp_path, 'annotations', 0, bbox=[1, 1, 0, 4])
    check_dataset_cfg(config(dataset))
    [(message, level)] = warnings
    assert 'annotation 5 of image 2 (2.png): box [1, 1, 0, 4]' in message
    assert level == logging.WARNING


def test_pictures_that_are_left_out_are_counted_in_the_log(dataset, warnings):
    dataset['filter_cfg'] = dict(filter_empty_gt=True, min_size=2)
    check_dataset_cfg(config(dataset))
    [(message, level)] = warnings
    assert '1 of 2 pictures have no box of any class and are left out' in message
    assert level == logging.WARNING
    warnings.clear()
    check_dataset_cfg(config(dict(dataset, test_mode=True)))
    assert warnings == []

    dataset['filter_cfg'] = dict(min_size=9)
    with pytest.raises(ValueError, match=r'of 2, 0 have no box .* 2 are less than 9 pixels'):
        check_dataset_cfg(config(dataset))


def test_long_lists_are_cut_and_counted(dataset, tmp_path, warnings):
    content = json.loads((tmp_path / 'ann.json').read_text())
    box = dict(image_id=2, category_id=1, bbox=[99, 1, 4, 4], area=16)
    content['annotations'] = [dict(box, id=i) for i in range(25)]
    (tmp_path / 'ann.json').write_text(json.dumps(content))
    check_dataset_cfg(config(dataset))
    assert len(warnings) == 11
    assert '25 such warnings in all' in warnings[-1][0]


def test_validation_is_checked_and_test_only_read(dataset, tmp_path):
    (tmp_path / 'ann.json').write_text('{}')
    loaders = dict(val_dataloader=dict(dataset=dataset), test_dataloader=dict(dataset=dataset))
    cfg = Config(dict(default_scope='mmdet', train_dataloader=None, **loaders))
    check_dataset_cfg(cfg, splits=('test',))
    with pytest.raises(ValueError, match="no list of objects under 'images'"):
        check_dataset_cfg(cfg)


def test_panoptic_files_are_not_read_as_boxes(dataset, tmp_path):
    (tmp_path / 'ann.json').write_text('{')
    check_dataset_cfg(config(dict(dataset, type='CocoPanopticDataset')))
    with pytest.raises(ValueError, match='broken JSON'):
        check_dataset_cfg(config(dict(dataset, type='DeepFashionDataset')))


def test_classification_sets():
    pytest.importorskip('mmpretrain')
    cifar = dict(type='CIFAR10', data_root='data/no/cifar10')
    imagenet = dict(type='ImageNet', data_root='data/no/imagenet', split='train')
    check_dataset_cfg(
        Config(dict(default_scope='mmpretrain', train_dataloader=dict(dataset=cifar)))
    )
    with pytest.raises(FileNotFoundError, match='put the data there'):
        cfg = dict(cifar, type='mmpretrain.CIFAR10', download=False)
        check_dataset_cfg(config(cfg))
    with pytest.raises(FileNotFoundError, match=r'https://image-net\.org'):
        check_dataset_cfg(config(dict(imagenet, type='mmpretrain.ImageNet')))


def test_unknown_types_and_remote_storage(dataset):
    with pytest.raises(ValueError, match="'NoDataset' is not registered"):
        check_dataset_cfg(config(dict(type='NoDataset', data_root='x')))
    remote = dict(dataset, data_root='s3://x', backend_args=dict(backend='petrel'))
    check_dataset_cfg(config(remote))


def test_a_picture_that_can_not_be_decoded_is_named_when_it_is_loaded(dataset, tmp_path):
    from mmdet.datasets import CocoDataset

    (tmp_path / 'img' / '2.png').write_bytes(b'no picture at all')
    dataset.pop('type')
    loaded = CocoDataset(**dataset, pipeline=[dict(type='mmdet.LoadImageFromFile')], test_mode=True)
    with pytest.raises(Exception, match=r'img/2\.png'):
        loaded[1]


def test_files_of_evaluators(dataset, tmp_path):
    cfg = config(dataset, val_dataloader=dict(dataset=dataset))
    for evaluator in (
        dict(type='CocoMetric', ann_file=f'{tmp_path}/no.json'),
        [dict(type='VOCMetric'), dict(type='CocoMetric', ann_file=f'{tmp_path}/no.json')],
    ):
        cfg.val_evaluator = evaluator
        with pytest.raises(FileNotFoundError, match=r'no\.json .*is missing'):
            check_dataset_cfg(cfg)
    cfg.val_evaluator = dict(type='CocoMetric', ann_file=f'{tmp_path}/ann.json')
    check_dataset_cfg(cfg)


def test_a_broken_test_set(dataset, tmp_path):
    cfg = config(dataset, test_dataloader=dict(dataset=dataset))
    text = (tmp_path / 'ann.json').read_text()
    (tmp_path / 'ann.json').write_text(text[:-9])
    with pytest.raises(ValueError, match=r'ann\.json: broken JSON'):
        check_dataset_cfg(cfg, splits=('test',))


def test_classes_in_a_file(dataset, tmp_path):
    file = tmp_path / 'classes.txt'
    file.write_text('cell\n')
    dataset['metainfo'] = dict(classes=str(file))
    check_dataset_cfg(config(dataset))
    file.write_text('nucleus\n')
    with pytest.raises(ValueError, match='nucleus'):
        check_dataset_cfg(config(dataset))


def model(classes, *names):
    """A model whose heads, with dots in their names, know some number of classes."""
    root = nn.Module()
    for name in names:
        parent = root
        for part in name.split('.'):
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.num_classes = classes
    return root


@pytest.mark.parametrize('head', ['bbox_head', 'roi_head.bbox_head', 'roi_head.mask_head.2'])
def test_a_head_with_other_classes_than_the_data(dataset, head):
    cfg = config(dict(type='RepeatDataset', times=2, dataset=dataset))
    check_class_counts(model(1, head), cfg)
    for count in (0, 2):
        with pytest.raises(
            ValueError, match=f'{head} has num_classes={count}, but the training set has 1 classes'
        ):
            check_class_counts(model(count, head), cfg)


def test_heads_that_know_other_classes(dataset):
    check_class_counts(
        model(9, 'rpn_head', 'roi_head.semantic_head', 'panoptic_head'), config(dataset)
    )
    reads_text = model(256, 'bbox_head')
    reads_text.language_model = nn.Module()
    check_class_counts(reads_text, config(dataset))


class Fetched(BaseDataset):
    """Counts how many build it at a time; the first one fetches."""

    def __init__(self, data_root, download=True, **kwargs):
        super().__init__(data_root=data_root, **kwargs)

    def load_data_list(self):
        if (path := Path(self.data_root, 'broken')).exists():
            raise RuntimeError(path.read_text())
        with Path(self.data_root, 'calls').open('a') as file:
            file.write('begin ')
            file.flush()
            time.sleep(0.1)
            file.write('end ')


def test_data_is_fetched_by_one_at_a_time(tmp_path):
    cfg = config(dict(type=Fetched, data_root=str(tmp_path)))
    threads = [threading.Thread(target=fetch_data, args=(cfg,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / 'calls').read_text() == 'begin end ' * 3


def test_data_that_can_not_be_fetched_is_named(tmp_path):
    (tmp_path / 'broken').write_text('no network')
    with pytest.raises(ValueError, match=f'Fetched in {tmp_path}: no network'):
        fetch_data(config(dict(type=Fetched, data_root=str(tmp_path))))
    fetch_data(config(dict(type=Fetched, data_root=str(tmp_path), download=False)))


def test_addresses_are_left_to_their_storage(dataset):
    check_dataset_cfg(config(dict(dataset, data_root='s3://bucket/coco/')))
