"""Put the first pictures of a folder into one.

python tools/analysis_tools/montage.py work_dirs/quickstart/pictures montage.png
"""

import argparse
import sys
from pathlib import Path

from PIL import Image

SUFFIXES = ('.png', '.jpg', '.jpeg', '.bmp', '.webp')
GAP = 8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Put the first pictures of a folder into one.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument('folder', type=Path, help='as written by tools/test.py --show-dir')
    parser.add_argument('out', type=Path, help='picture to write')
    parser.add_argument('--rows', type=int, default=3)
    parser.add_argument('--columns', type=int, default=2)
    parser.add_argument('--width', type=int, default=560, help='of one picture, in pixels')
    args = parser.parse_args()
    for name in ('rows', 'columns', 'width'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} must be at least 1, got {getattr(args, name)}')
    return args


def montage(paths: list[Path], columns: int, width: int) -> Image.Image:
    """The pictures row by row on white, all as wide as ``width`` and as high as the first."""
    pictures = [Image.open(path).convert('RGB') for path in paths]
    height = round(pictures[0].height * width / pictures[0].width)
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    size = columns * (width + GAP) - GAP, rows * (height + GAP) - GAP
    whole = Image.new('RGB', size, 'white')
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        small = picture.resize((width, height), Image.Resampling.LANCZOS)
        whole.paste(small, (column * (width + GAP), row * (height + GAP)))
    return whole


def main() -> None:
    args = parse_args()
    paths = sorted(path for path in args.folder.glob('*') if path.suffix.lower() in SUFFIXES)
    if not paths:
        sys.exit(f'{args.folder} holds no picture')
    args.out.parent.mkdir(parents=True, exist_ok=True)
    montage(paths[: args.rows * args.columns], args.columns, args.width).save(args.out)
    print(f'{args.out}: {min(len(paths), args.rows * args.columns)} of {len(paths)} pictures')


if __name__ == '__main__':
    main()
