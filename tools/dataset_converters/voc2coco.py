"""Convert a Pascal VOC folder to COCO-format JSON, one file a split; pictures stay where they are.

The folder holds ``Annotations/ID.xml``, ``JPEGImages/ID.jpg`` (or png, bmp, tif, webp) and
``ImageSets/Main/SPLIT.txt`` with one ID a line. Boxes are ``[xmin, ymin, xmax - xmin,
ymax - ymin]``, as MMDetection reads VOC; objects marked difficult get ``iscrowd=1``, so that they
are neither trained on nor counted, as in VOC's own evaluation.

python tools/dataset_converters/voc2coco.py data/bccd
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (the checkout's package, where none is installed)

# isort: split
import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter

from tqdm import tqdm

from mmstepnet.datasets.check_coco import decoded_size
from mmstepnet.utils.files import write_whole

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


class BadPicture(Exception):
    """A picture or its annotation file can't be used at all."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Convert a Pascal VOC folder to COCO-format JSON, one file a split.'
    )
    parser.add_argument('voc_root', type=Path, help='the folder that holds Annotations/')
    parser.add_argument('--out-dir', type=Path, help='folder of the JSON files [ROOT/annotations]')
    parser.add_argument('--splits', nargs='+', help='names in ImageSets/Main [all]')
    parser.add_argument('--classes', nargs='+', help='names in order [those found, sorted]')
    parser.add_argument(
        '--strict',
        action='store_true',
        help='write nothing if any box had to be left out or clipped',
    )
    args = parser.parse_args()
    if len({*(args.classes or ())}) < len(args.classes or ()):
        parser.error(f'--classes names something twice: {" ".join(args.classes)}')
    return args


def read_splits(voc_root: Path, names: list[str] | None) -> dict[str, list[str]]:
    """The IDs of each split.

    Files with two columns (VOC's ``aeroplane_train.txt``) list a class, not a split, and are passed
    over where no names are given.
    """
    folder = voc_root / 'ImageSets' / 'Main'
    if not folder.is_dir():
        sys.exit(f'{folder} is missing: {voc_root} is no Pascal VOC folder')
    splits = {}
    for name in names or sorted(path.stem for path in folder.glob('*.txt')):
        path = folder / f'{name}.txt'
        if not path.is_file():
            sys.exit(
                f'{path} is missing, there are: {sorted(p.stem for p in folder.glob("*.txt"))}'
            )
        rows = [line.split() for line in path.read_text(encoding='utf-8').splitlines()]
        rows = [row for row in rows if row]
        if names is None and any(len(row) > 1 for row in rows):
            continue
        splits[name] = [row[0] for row in rows]
    if not any(splits.values()):
        sys.exit(f'{folder} lists no picture')
    return splits


def read_picture(voc_root: Path, stem: str) -> tuple[str, int, int, list[dict]]:
    """Everything about one ID.

    Returns:
        The picture's file name, its width and height as found in the picture itself, and the
        objects: dicts of ``name``, ``difficult`` and ``box`` (xmin, ymin, xmax, ymax).

    Raises:
        BadPicture: XML or picture is missing, or can't be read; says which file and why.
    """
    xml = voc_root / 'Annotations' / f'{stem}.xml'
    try:
        root = ElementTree.parse(xml).getroot()
    except FileNotFoundError:
        raise BadPicture(f'{xml} is missing') from None
    except ElementTree.ParseError as error:
        raise BadPicture(f'{xml}: broken XML: {error}') from None

    folder = voc_root / 'JPEGImages'
    # Some annotation programs write a whole path.
    candidates = [folder / Path((root.findtext('filename') or '').strip()).name]
    candidates = [path for path in candidates if path.stem == Path(stem).stem]
    candidates += [folder / f'{stem}{suffix}' for suffix in SUFFIXES]
    picture = next((path for path in candidates if path.is_file()), None)
    if picture is None:
        raise BadPicture(f'{folder / stem}.*: no picture for {xml}')
    try:
        width, height = decoded_size(str(picture))
    except Exception as error:  # decoders raise whatever the format's plugin does
        raise BadPicture(f'{picture} can not be decoded: {error}') from None

    objects = []
    for number, found in enumerate(root.iter('object'), 1):
        try:
            box = [
                float(found.findtext(f'bndbox/{side}')) for side in ('xmin', 'ymin', 'xmax', 'ymax')
            ]
            if not all(map(math.isfinite, box)):
                raise ValueError
        except (TypeError, ValueError):
            raise BadPicture(f'{xml}: object {number} has no bndbox of four numbers') from None
        name = (found.findtext('name') or '').strip()
        if not name:
            raise BadPicture(f'{xml}: object {number} has no name')
        difficult = (found.findtext('difficult') or '0').strip() == '1'
        objects.append(dict(name=name, difficult=difficult, box=box))
    return picture.relative_to(folder).as_posix(), width, height, objects


def box_problem(box: list[float], width: int, height: int) -> str | None:
    """Why a box has to be left out, None for a usable one."""
    left, top, right, bottom = box
    if right <= left or bottom <= top:
        return 'no area'
    if left >= width or top >= height or right <= 0 or bottom <= 0:
        return 'outside'
    left, top, right, bottom = clip(box, width, height)
    if right - left < 1 or bottom - top < 1:
        return 'less than one pixel wide or high'
    return None


def clip(box: list[float], width: int, height: int) -> list[float]:
    """The part of a box inside the picture."""
    limits = (width, height, width, height)
    return [min(max(value, 0.0), limit) for value, limit in zip(box, limits, strict=True)]


def convert(pictures: list[tuple], classes: list[str]) -> dict:
    """COCO content of (file name, width, height, objects) with usable boxes only."""
    images, annotations = [], []
    for image_id, (name, width, height, objects) in enumerate(pictures, 1):
        images.append(dict(id=image_id, file_name=name, width=width, height=height))
        for found in objects:
            left, top, right, bottom = found['box']
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image_id,
                    category_id=classes.index(found['name']) + 1,
                    bbox=[left, top, right - left, bottom - top],
                    area=(right - left) * (bottom - top),
                    iscrowd=int(found['difficult']),
                )
            )
    # Pascal VOC says nothing of classes that are akin: each is its own.
    categories = [
        dict(id=number, name=name, supercategory=name) for number, name in enumerate(classes, 1)
    ]
    return dict(images=images, annotations=annotations, categories=categories)


def main() -> None:
    args = parse_args()
    out_dir = args.out_dir or args.voc_root / 'annotations'
    splits = read_splits(args.voc_root, args.splits)

    pictures, errors = {}, []
    for name, stems in splits.items():
        errors += (
            f'{args.voc_root}/ImageSets/Main/{name}.txt: {stem} is listed {count} times'
            for stem, count in Counter(stems).items()
            if count > 1
        )
    stems = list(dict.fromkeys(stem for split in splits.values() for stem in split))
    for stem in tqdm(stems, desc='reading', unit='picture'):
        try:
            pictures[stem] = read_picture(args.voc_root, stem)
        except BadPicture as error:
            errors.append(str(error))
    if errors:
        sys.exit('\n'.join([*errors, f'{len(errors)} errors, nothing was written']))

    found = sorted({obj['name'] for picture in pictures.values() for obj in picture[3]})
    classes = args.classes or found
    left_out, clipped = [], []
    for stem, (name, width, height, objects) in pictures.items():
        usable = []
        for obj in objects:
            label = f'{args.voc_root}/Annotations/{stem}.xml: {obj["name"]} {obj["box"]}'
            reason = box_problem(obj['box'], width, height)
            if obj['name'] not in classes:
                reason = 'not one of the classes'
            if reason:
                left_out.append(f'{label}: left out, {reason}')
                continue
            inside = clip(obj['box'], width, height)
            if inside != obj['box']:
                clipped.append(f'{label}: clipped to the picture of {width}x{height}')
            usable.append({**obj, 'box': inside})
        pictures[stem] = name, width, height, usable
    for line in left_out + clipped:
        print(line, file=sys.stderr)
    if args.strict and (left_out or clipped):
        sys.exit(f'--strict: {len(left_out) + len(clipped)} unusable boxes, nothing was written')

    out_dir.mkdir(parents=True, exist_ok=True)
    for name, stems in splits.items():
        content = convert([pictures[stem] for stem in stems], classes)
        path = out_dir / f'{name}.json'
        write_whole(json.dumps(content) + '\n', path)
        print(f'{path}: {len(content["images"])} pictures, {len(content["annotations"])} boxes')
    print(f'classes: {" ".join(classes)}')
    print(f'{len(left_out)} boxes left out, {len(clipped)} clipped')


if __name__ == '__main__':
    main()
