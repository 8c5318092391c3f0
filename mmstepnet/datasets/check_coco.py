"""Find what is wrong with a COCO-format detection set before anything is trained on it.

MMDetection's ``CocoDataset`` leaves out boxes that it can't use and overwrites entries with equal
ids, without a word. The check here says what would be lost, by file and id.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

_EXIF_ORIENTATION = 0x0112
_EXIF_SIDEWAYS = (5, 6, 7, 8)


class Problem(NamedTuple):
    """One finding of :func:`check_coco`.

    ``fatal``: training would stop on it, or learn from wrong or missing data. Otherwise the one box
    or the pictures that ``message`` names are left out, or clipped, by MMDetection and all other
    data stays as it is.
    """

    fatal: bool
    message: str

    def __str__(self) -> str:
        return f'{"error" if self.fatal else "warning"}: {self.message}'


def check_coco(
    ann_file: str,
    img_prefix: str | None = None,
    classes: Sequence[str] | None = None,
    decode: bool = False,
    filter_cfg: dict | None = None,
) -> list[Problem]:
    """Check a COCO-format annotation file and the pictures that it names.

    Args:
        ann_file: Path of the JSON file.
        img_prefix: Folder that ``file_name`` of the pictures is relative to; with ``None`` the
            pictures aren't looked for.
        classes: The class names that a model is to be trained with, in order; ``None`` stands for
            those of the file.
        decode: Also decode every picture and compare its size with the one that is stated.
        filter_cfg: What a training set is to leave out by ``CocoDataset``'s argument of this name:
            pictures without a box of any class (``filter_empty_gt``) and those whose shorter side
            is below ``min_size`` pixels.

    Returns:
        All problems found, those of whole pictures left out first, the others in the order of
        the file; empty if there are none.
    """
    try:
        with open(ann_file, encoding='utf-8') as file:
            content = json.load(file)
    except OSError as error:
        return [Problem(True, f'{ann_file}: can not be read: {error.strerror}')]
    except json.JSONDecodeError as error:
        where = f'line {error.lineno}, column {error.colno}'
        return [Problem(True, f'{ann_file}: broken JSON at {where}: {error.msg}')]
    except UnicodeDecodeError as error:
        return [Problem(True, f'{ann_file}: not a JSON text file: {error}')]

    problems = []
    for key in ('images', 'annotations', 'categories'):
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            problems.append(Problem(True, f'{ann_file}: no list of objects under {key!r}'))
    if problems:
        return problems

    findings = [
        *_check_filter(content, classes, filter_cfg or {}),
        *_check_ids(content),
        *_check_categories(content['categories'], classes),
        *_check_images(content['images'], img_prefix, decode),
        *_check_annotations(content, classes),
    ]
    return [Problem(fatal, f'{ann_file}: {message}') for fatal, message in findings]


def _check_ids(content: dict) -> Iterator[tuple[bool, str]]:
    for key, noun in (
        ('categories', 'category'),
        ('images', 'image'),
        ('annotations', 'annotation'),
    ):
        seen = set()
        for position, entry in enumerate(content[key]):
            number = entry.get('id')
            if not _is_id(number):
                yield True, f'{noun} at position {position} has no number as id: {number!r}'
            elif number in seen:
                yield True, f'{noun} id {number} is used more than once'
            else:
                seen.add(number)


def _check_categories(
    categories: list[dict], classes: Sequence[str] | None
) -> Iterator[tuple[bool, str]]:
    names = [category.get('name') for category in categories]
    for category, name in zip(categories, names, strict=True):
        if not isinstance(name, str):
            yield True, f'category {category.get("id")}: name is {name!r}, not a text'
    names = [str(name) for name in names]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield True, f'category name {name!r} is used more than once'
    if classes is None:
        return
    missing = [name for name in classes if name not in names]
    if missing:
        yield True, f'no category for classes {missing}; the file has {names}'
    elif [name for name in names if name in classes] != list(classes):
        # CocoDataset numbers its labels in the file's order, so names and labels would not match.
        yield (
            True,
            f'categories come in the order {names}, the classes in the order {list(classes)}',
        )


def _check_images(
    images: list[dict], img_prefix: str | None, decode: bool
) -> Iterator[tuple[bool, str]]:
    decode = decode and img_prefix is not None
    for image in tqdm(images, desc='decoding', unit='picture', disable=not decode):
        number, name = image.get('id'), image.get('file_name')
        size = image.get('width'), image.get('height')
        if not all(isinstance(length, int) and length > 0 for length in size):
            yield True, f'image {number} ({name}): width and height are {size[0]!r}, {size[1]!r}'
        if not isinstance(name, str):
            yield True, f'image {number}: no file_name'
            continue
        if img_prefix is None:
            continue
        path = os.path.join(img_prefix, name)
        try:
            if os.path.getsize(path) == 0:
                yield True, f'image {number}: {path} is an empty file'
                continue
        except (OSError, ValueError) as error:  # a ValueError for a NUL in the name
            yield True, f'image {number}: {path}: {getattr(error, "strerror", error)}'
            continue
        if decode:
            try:
                found = decoded_size(path)
            except Exception as error:  # decoders raise whatever the format's plugin does
                yield True, f'image {number}: {path} can not be decoded: {error}'
                continue
            if found != size:
                yield (
                    True,
                    (
                        f'image {number}: {path} is {found[0]}x{found[1]}, '
                        f'the file says {size[0]}x{size[1]}'
                    ),
                )


def decoded_size(path: str) -> tuple[int, int]:
    """Decode a picture whole and return (width, height) as seen by the training's loader.

    Pillow is used since it refuses a truncated file, which OpenCV fills up with grey. The loader
    turns a picture by its EXIF orientation, so the size is that after turning.
    """
    with Image.open(path) as picture:
        picture.load()
        width, height = picture.size
        if picture.getexif().get(_EXIF_ORIENTATION) in _EXIF_SIDEWAYS:
            return height, width
        return width, height


def _check_annotations(content: dict, classes: Sequence[str] | None) -> Iterator[tuple[bool, str]]:
    images = {image['id']: image for image in content['images'] if _is_id(image.get('id'))}
    names = {
        category['id']: str(category.get('name'))
        for category in content['categories']
        if _is_id(category.get('id'))
    }
    unused = {}
    for annotation in content['annotations']:
        image_id, category = annotation.get('image_id'), annotation.get('category_id')
        label = f'annotation {annotation.get("id")}'
        if not _is_id(image_id) or image_id not in images:
            yield True, f'{label}: image id {image_id!r} is unknown'
            continue
        image = images[image_id]
        label += f' of image {image_id} ({image.get("file_name")})'
        if not _is_id(category) or category not in names:
            yield True, f'{label}: category id {category!r} is unknown, known are {list(names)}'
        elif classes is not None and names[category] not in classes:
            unused[names[category]] = unused.get(names[category], 0) + 1

        box, area = annotation.get('bbox'), annotation.get('area')
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
            yield True, f'{label}: bbox is {box!r}, not four finite numbers'
            continue
        if not _is_number(area):
            yield True, f'{label}: area is {area!r}, not a finite number'
            continue
        yield from _check_box(label, box, area, image)
    for name, count in unused.items():
        yield False, f'{count} boxes of {name!r} are not used, it is none of the classes'


def _check_filter(
    content: dict, classes: Sequence[str] | None, filter_cfg: dict
) -> Iterator[tuple[bool, str]]:
    used = [
        category.get('id')
        for category in content['categories']
        if classes is None or category.get('name') in classes
    ]
    with_box = {
        annotation['image_id']
        for annotation in content['annotations']
        if _is_id(annotation.get('image_id')) and annotation.get('category_id') in used
    }
    images = content['images']
    left = images
    if filter_cfg.get('filter_empty_gt'):
        left = [i for i in images if _is_id(i.get('id')) and i['id'] in with_box]
        if len(left) < len(images):
            yield (
                False,
                f'{len(images) - len(left)} of {len(images)} pictures have no box of any class '
                'and are left out; filter_cfg.filter_empty_gt says so',
            )
    side = filter_cfg.get('min_size', 0)
    small = [
        image
        for image in left
        if any(_is_number(image.get(k)) and image[k] < side for k in ('width', 'height'))
    ]
    if small:
        yield (
            False,
            f'{len(small)} of {len(images)} pictures are less than {side} pixels wide or high and '
            f'are left out (first: image {small[0].get("id")} ({small[0].get("file_name")})); '
            'filter_cfg.min_size says so',
        )
    if not images:
        yield True, 'the file lists no pictures'
    elif len(left) == len(small):
        yield (
            True,
            f'no picture is left to use: of {len(images)}, {len(images) - len(left)} have no box '
            f'of any class and {len(small)} are less than {side} pixels wide or high (filter_cfg)',
        )


def _is_id(value) -> bool:
    return isinstance(value, int | str)


def _is_number(value) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _check_box(
    label: str, box: list[float], area: float, image: dict
) -> Iterator[tuple[bool, str]]:
    """The conditions under which ``mmdet.CocoDataset`` (3.3) leaves a box out, or clips it."""
    x, y, width, height = box
    if width <= 0 or height <= 0 or area <= 0:
        yield False, f'{label}: box {box} with area {area} has no extent, it is left out'
        return
    if width < 1 or height < 1:
        yield False, f'{label}: box {box} is less than one pixel wide or high, it is left out'
        return
    across, down = image.get('width'), image.get('height')
    if not _is_number(across) or not _is_number(down):
        return
    if x >= across or y >= down or x + width <= 0 or y + height <= 0:
        yield (
            False,
            (f'{label}: box {box} is outside the picture of {across}x{down}, it is left out'),
        )
    elif min(x, y) < -1 or x + width > across + 1 or y + height > down + 1:
        yield (
            False,
            (f'{label}: box {box} sticks out of the picture of {across}x{down}, it is clipped'),
        )
