"""Run a detector or a classifier on pictures; save them with the predictions drawn in, and as JSON.

Thin over MMDetection's DetInferencer and MMPretrain's ImageClassificationInferencer.
"""

import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import glob
import json
import sys
from collections import defaultdict
from pathlib import Path

import mmcv
from mmengine.config import Config

from mmstepnet.utils import checkpoint as ckpt
from mmstepnet.utils.command_line import (
    BAD_INPUT,
    add_settings_argument,
    build_model,
    fail,
    library,
    load_config,
    make_folder,
    usable_device,
)

SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.ppm', '.tif', '.tiff', '.webp')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('image', help='a picture, a folder of pictures, or a pattern in quotes')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument(
        '--out-dir', default='outputs', help='where the results go (default: outputs)'
    )
    parser.add_argument(
        '--score-thr', type=float, default=0.3, help='least score of a drawn box (default: 0.3)'
    )
    parser.add_argument('--batch-size', type=int, default=1, help='pictures at once (default: 1)')
    parser.add_argument(
        '--device', type=usable_device, help='cpu, cuda:0, ... (default: a GPU where there is one)'
    )
    add_settings_argument(parser, 'model.test_cfg.rcnn.nms.iou_threshold=0.6')
    return parser.parse_args()


def find_pictures(image: str) -> list[str]:
    """The pictures that an argument means; ends the process where there is none."""
    path = Path(image)
    if path.is_file():
        return [image]
    if path.is_dir():
        found = [str(p) for p in sorted(path.iterdir()) if p.suffix.lower() in SUFFIXES]
    else:
        found = [p for p in sorted(glob.glob(image, recursive=True)) if Path(p).is_file()]
    if not found:
        fail(f'no picture at {image}')
    by_name = defaultdict(list)
    for picture in found:
        by_name[Path(picture).stem].append(picture)
    clash = next((same for same in by_name.values() if len(same) > 1), None)
    if clash:
        fail(f'{clash[0]} and {clash[1]} would be saved under the same name; run them separately')
    return found


def leave_out_unreadable(pictures: list[str]) -> tuple[list[str], list[str]]:
    """Split pictures into those that can be decoded and the rest, which it names."""
    good, bad = [], []
    for picture in pictures:
        try:
            readable = mmcv.imread(picture) is not None
        except (OSError, ValueError):
            readable = False
        (good if readable else bad).append(picture)
    for picture in bad:
        print(f'error: {picture} is not a readable picture', file=sys.stderr)
    return good, bad


def detect(cfg: Config, args: argparse.Namespace, pictures: list[str]) -> None:
    """Boxes: pictures under ``vis/``, predictions under ``preds/``."""
    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(cfg, weights=args.checkpoint, device=args.device)
    inferencer(
        pictures,
        batch_size=args.batch_size,
        pred_score_thr=args.score_thr,
        no_save_pred=False,
        out_dir=args.out_dir,
    )


def classify(cfg: Config, args: argparse.Namespace, pictures: list[str]) -> None:
    """Classes: pictures under ``vis/``, predictions in ``predictions.json``."""
    from mmpretrain import ImageClassificationInferencer

    vis = Path(args.out_dir, 'vis')
    vis.mkdir(parents=True, exist_ok=True)
    inferencer = ImageClassificationInferencer(cfg, pretrained=args.checkpoint, device=args.device)
    predictions = {
        picture: {**result, 'pred_scores': result['pred_scores'].tolist()}
        for picture, result in zip(
            pictures,
            inferencer(pictures, batch_size=args.batch_size, show_dir=str(vis)),
            strict=True,
        )
    }
    Path(args.out_dir, 'predictions.json').write_text(json.dumps(predictions, indent=1))


def main() -> None:
    args = parse_args()
    cfg = load_config(args.config, args.cfg_options)
    found = find_pictures(args.image)
    pictures, unreadable = leave_out_unreadable(found)
    if not pictures:
        raise SystemExit(BAD_INPUT)
    try:
        content = ckpt.read_checkpoint(args.checkpoint)
        ckpt.check_same_network(build_model(cfg), content, args.checkpoint)
    except ckpt.CheckpointError as error:
        fail(error)
    make_folder(args.out_dir)
    run = classify if library(cfg) == 'mmpretrain' else detect
    run(cfg, args, pictures)
    print(f'{len(pictures)} pictures of {len(found)}: results are in {args.out_dir}')
    if unreadable:
        raise SystemExit(BAD_INPUT)


if __name__ == '__main__':
    main()
