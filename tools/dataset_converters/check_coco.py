"""List everything that is wrong with a COCO-format data set; exit code 1 if there is anything.

python tools/dataset_converters/check_coco.py data/coco/annotations/instances_val2017.json \
    data/coco/val2017 --images
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (the checkout's package, where none is installed)

# isort: split
import argparse

from mmstepnet.datasets.check_coco import check_coco


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='List everything that is wrong with a COCO-format data set.'
    )
    parser.add_argument('ann_file', help='the JSON file')
    parser.add_argument('img_prefix', nargs='?', help='folder of the pictures')
    parser.add_argument('--classes', nargs='+', help='names and order that a config will use')
    parser.add_argument('--images', action='store_true', help='decode every picture as well')
    args = parser.parse_args()
    if args.images and args.img_prefix is None:
        parser.error('--images needs the folder of the pictures')
    return args


def main() -> None:
    args = parse_args()
    problems = check_coco(args.ann_file, args.img_prefix, args.classes, decode=args.images)
    for problem in problems:
        print(problem)
    fatal = sum(problem.fatal for problem in problems)
    print(f'{args.ann_file}: {fatal} errors, {len(problems) - fatal} warnings')
    sys.exit(1 if problems else 0)


if __name__ == '__main__':
    main()
