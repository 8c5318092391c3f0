"""Compose scikit-learn's handwritten digits into a detection set in COCO format.

Every picture is a crop of one of scikit-learn's two sample photographs with some of its 1,797 real
8x8 digits on it, each of its own size, place and colour; boxes don't overlap. The digits of the
validation pictures appear in no training picture, and neither does the part of the photographs that
lies behind them.

The same options give the same JSON and the same pixels on every machine: random numbers come from
NumPy's frozen ``RandomState``, resizing and blending are integer arithmetic. PNG files are written
by Pillow, without metadata; their bytes are the same as long as Pillow brings the same zlib.

python tools/dataset_converters/digits2coco.py --out data/digits_coco
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (the checkout's package, where none is installed)

# isort: split
import argparse
import json
import shutil

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from tqdm import tqdm

from mmstepnet.datasets.check_coco import check_coco

DESCRIPTION = 'Handwritten digits of scikit-learn over its sample photographs'
VAL_FRACTION = 0.25  # of each digit's samples, and of the photographs' width
DIGITS_PER_PICTURE = (3, 8)
EDGE = (0.20, 0.45)  # of a digit's square, relative to the picture's
CONTRAST = 60  # least difference in brightness, of 255, between a digit and what is behind it
VISIBLE = 96  # opacity, of 255, from which a pixel belongs to the digit's box
GAP = 2  # pixels between two boxes
TRIES = 40


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compose scikit-learn's digits into a detection set in COCO format.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument('--out', type=Path, default=Path('data/digits_coco'), help='folder to make')
    parser.add_argument('--train', type=int, default=1600, help='number of training pictures')
    parser.add_argument('--val', type=int, default=200, help='number of validation pictures')
    parser.add_argument('--size', type=int, default=128, help='edge of a picture in pixels')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    for name, least in (('train', 1), ('val', 1), ('size', 32), ('seed', 0)):
        if getattr(args, name) < least:
            parser.error(f'--{name} must be at least {least}, got {getattr(args, name)}')
    if args.size > 300:
        parser.error(f'--size must be at most 300, got {args.size}: the photographs are not larger')
    return args


def split_digits(seed: int) -> dict[str, np.ndarray]:
    """Indices into ``load_digits`` for training and validation, disjoint, split class by class."""
    target = load_digits().target
    random = np.random.RandomState(seed)
    splits = {'train': [], 'val': []}
    for digit in range(10):
        indices = random.permutation(np.flatnonzero(target == digit))
        count = round(len(indices) * VAL_FRACTION)
        splits['val'].append(indices[:count])
        splits['train'].append(indices[count:])
    return {split: np.sort(np.concatenate(parts)) for split, parts in splits.items()}


def split_photographs() -> dict[str, list[np.ndarray]]:
    """The left part of each photograph for training, the rest of it for validation; (H, W, 3)."""
    photographs = load_sample_images().images
    cut = [round(photo.shape[1] * (1 - VAL_FRACTION)) for photo in photographs]
    return {
        'train': [photo[:, :column] for photo, column in zip(photographs, cut, strict=True)],
        'val': [photo[:, column:] for photo, column in zip(photographs, cut, strict=True)],
    }


def background(random: np.random.RandomState, photographs: list[np.ndarray], size: int):
    """A random square crop of a random photograph, resized to (size, size, 3)."""
    photo = photographs[random.randint(len(photographs))]
    shortest = min(photo.shape[:2])
    edge = random.randint(min(size // 2, shortest), shortest + 1)
    top = random.randint(photo.shape[0] - edge + 1)
    left = random.randint(photo.shape[1] - edge + 1)
    crop = Image.fromarray(photo[top : top + edge, left : left + edge])
    return np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR)).astype(np.int64)


def brightness(colour: np.ndarray) -> int:
    """Mean luma (ITU-R BT.601) of colours (..., 3) in 0..255, rounded down."""
    return int(
        (colour.reshape(-1, 3) @ np.array([299, 587, 114])).sum() // (colour.size // 3 * 1000)
    )


def compose(
    random: np.random.RandomState,
    photographs: list[np.ndarray],
    digits: np.ndarray,
    pool: np.ndarray,
    size: int,
) -> tuple[np.ndarray, list[tuple[int, list[int]]]]:
    """One picture.

    Args:
        random: Source of all randomness.
        photographs: What backgrounds are cut from, (H, W, 3) uint8 each.
        digits: All digits, (N, 8, 8) with values 0..16.
        pool: Indices of the digits that may be drawn.
        size: Edge of the picture.

    Returns:
        The picture (size, size, 3) uint8, and for each digit on it the index and the box
        ``[x, y, width, height]``, tight around its visible pixels.
    """
    picture = background(random, photographs, size)
    placed = []
    for _ in range(random.randint(DIGITS_PER_PICTURE[0], DIGITS_PER_PICTURE[1] + 1)):
        index = int(pool[random.randint(len(pool))])
        edge = random.randint(round(EDGE[0] * size), round(EDGE[1] * size) + 1)
        drawn = Image.fromarray((digits[index] * 255 // 16).astype(np.uint8))
        opacity = np.asarray(drawn.resize((edge, edge), Image.Resampling.BICUBIC)).astype(np.int64)
        rows = np.flatnonzero((opacity >= VISIBLE).any(1))
        columns = np.flatnonzero((opacity >= VISIBLE).any(0))
        height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        for _ in range(TRIES):
            top, left = random.randint(size - edge + 1), random.randint(size - edge + 1)
            box = [left + int(columns[0]), top + int(rows[0]), width, height]
            if not any(overlap(box, other) for _, other in placed):
                break
        else:
            continue
        area = picture[top : top + edge, left : left + edge]
        behind = brightness(area)
        colour = random.randint(256, size=3)
        while abs(brightness(colour) - behind) < CONTRAST:
            colour = random.randint(256, size=3)
        area += opacity[..., None] * (colour - area) // 255
        placed.append((index, box))
    return picture.astype(np.uint8), placed


def overlap(first: list[int], second: list[int]) -> bool:
    """Whether two ``[x, y, width, height]`` boxes come closer than ``GAP`` to each other."""
    return all(
        first[axis] < second[axis] + second[axis + 2] + GAP
        and second[axis] < first[axis] + first[axis + 2] + GAP
        for axis in (0, 1)
    )


def make_split(folder: Path, split: str, parameters: dict, progress: tqdm) -> None:
    """Write ``folder/SPLIT/*.png`` and ``folder/annotations/SPLIT.json``."""
    seed, size = parameters['seed'], parameters['size']
    data, photographs = load_digits(), split_photographs()[split]
    digits, pool = data.images.astype(np.int64), split_digits(seed)[split]
    images, annotations = [], []
    (folder / split).mkdir(parents=True)
    for number in range(1, parameters[split] + 1):
        random = np.random.RandomState([seed, ('train', 'val').index(split), number])
        picture, placed = compose(random, photographs, digits, pool, size)
        name = f'{number:06d}.png'
        Image.fromarray(picture).save(folder / split / name)
        images.append(dict(id=number, file_name=name, width=size, height=size))
        for index, box in placed:
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=number,
                    category_id=int(data.target[index]) + 1,
                    bbox=box,
                    area=box[2] * box[3],
                    iscrowd=0,
                    sample=index,
                )
            )
        progress.update()
    content = dict(
        info=dict(description=DESCRIPTION, split=split, parameters=parameters),
        categories=[
            dict(id=digit + 1, name=str(digit), supercategory='digit') for digit in range(10)
        ],
        images=images,
        annotations=annotations,
    )
    ann_file = folder / 'annotations' / f'{split}.json'
    ann_file.parent.mkdir(exist_ok=True)
    ann_file.write_text(json.dumps(content) + '\n', encoding='utf-8')


def is_complete(folder: Path, parameters: dict) -> bool:
    """Whether the folder holds the whole set, made with the same parameters."""
    for split in ('train', 'val'):
        ann_file = folder / 'annotations' / f'{split}.json'
        if check_coco(str(ann_file), str(folder / split)):
            return False
        if json.loads(ann_file.read_text()).get('info', {}).get('parameters') != parameters:
            return False
    return True


def is_ours(folder: Path) -> bool:
    """Whether the folder was made here, so that it may be replaced; one readable JSON is enough."""
    for ann_file in folder.glob('annotations/*.json'):
        try:
            if json.loads(ann_file.read_text())['info']['description'] == DESCRIPTION:
                return True
        except (ValueError, KeyError, TypeError):
            continue
    return False


def main() -> None:
    args = parse_args()
    # Where a link leads is replaced, not the link.
    args.out = args.out.resolve()
    parameters = dict(
        train=args.train,
        val=args.val,
        size=args.size,
        seed=args.seed,
        digits_per_picture=list(DIGITS_PER_PICTURE),
        edge=list(EDGE),
        contrast=CONTRAST,
        visible=VISIBLE,
        gap=GAP,
        tries=TRIES,
        val_fraction=VAL_FRACTION,
    )
    if is_complete(args.out, parameters):
        print(f'{args.out} is complete already')
        return
    free = not args.out.exists() or (args.out.is_dir() and not any(args.out.iterdir()))
    if not free and not is_ours(args.out):
        sys.exit(f'{args.out} holds something else: remove it or choose another --out')

    # Made beside its place and then moved there, so that the folder is never half finished.
    partial = args.out.with_name(args.out.name + '.partial')
    shutil.rmtree(partial, ignore_errors=True)
    with tqdm(total=args.train + args.val, desc='digits', unit='picture') as progress:
        for split in ('train', 'val'):
            make_split(partial, split, parameters, progress)
    if args.out.exists():
        shutil.rmtree(args.out)
    partial.rename(args.out)
    print(f'{args.out}: {args.train} training and {args.val} validation pictures')


if __name__ == '__main__':
    main()
