"""Count parameters and FLOPs of a config's network, part by part, and its step sizes' share.

Needs no data and no weights: the network is traced on one empty picture.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import json
import textwrap
import warnings
from dataclasses import asdict

from mmengine.config import Config

from mmstepnet.utils.command_line import (
    add_settings_argument,
    build_model,
    fail,
    load_config,
    make_folder,
    reason,
)
from mmstepnet.utils.complexity import CONVENTION, Complexity, Cost, measure_complexity
from mmstepnet.utils.text_table import Table


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__ + '\n' + CONVENTION)
    parser.add_argument('config', help='config file of a detector or a classifier')
    parser.add_argument(
        '--shape',
        type=int,
        nargs=2,
        metavar=('H', 'W'),
        help="height and width of the picture, before padding (default: what the config's test "
        'pictures are resized or cropped to, else what its training pictures are cropped to; of '
        '(1333, 800) with keep_ratio that is 800 x 1333)',
    )
    parser.add_argument('--out', type=Path, metavar='FILE.json', help='write the numbers there')
    add_settings_argument(parser, 'model.test_cfg.rpn.max_per_img=300')
    args = parser.parse_args(argv)
    if args.out is not None and args.out.suffix != '.json':
        parser.error(f'--out must end in .json, got {args.out}')
    if args.shape is not None and min(args.shape) < 1:
        parser.error(f'--shape must be two positive numbers, got {args.shape[0]} {args.shape[1]}')
    return args


def shape_of_pictures(cfg: Config) -> tuple[int, int] | None:
    """Height and width that the config's transforms give its pictures; None if they give none."""
    for loader in ('test_dataloader', 'val_dataloader', 'train_dataloader'):
        dataset = (cfg.get(loader) or {}).get('dataset', {})
        while 'dataset' in dataset:
            dataset = dataset['dataset']
        found = None
        for transform in dataset.get('pipeline', []):
            found = _shape_after(transform) or found
        if found is not None:
            return found
    return None


def _shape_after(transform: dict) -> tuple[int, int] | None:
    kind = str(transform['type']).rpartition('.')[2]
    key = dict(
        CenterCrop='crop_size', RandomCrop='crop_size', Resize='scale', RandomResizedCrop='scale'
    ).get(kind)
    size = transform.get(key)
    if isinstance(size, int):
        return (size, size)
    if not isinstance(size, list | tuple) or not all(isinstance(side, int) for side in size):
        return None
    if kind != 'Resize':
        return tuple(size)
    # MMCV's order is width and height; with keep_ratio it is long and short side.
    return (min(size), max(size)) if transform.get('keep_ratio') else (size[1], size[0])


def parts_table(result: Complexity) -> Table:
    """One row a part of the network, and their sum."""
    table = Table(['part', 'class', 'parameters', '', 'FLOPs', ''])
    for name, part in result.parts.items():
        table.rows.append([name or '(outside)', part.kind, *_cells(part, result)])
    total = Cost('', 1, result.parameters, result.flops)
    table.rows.append(['total', '', *_cells(total, result)])
    return table


def step_sizes_table(result: Complexity) -> Table:
    """One row a kind of step size."""
    table = Table(['step sizes', 'number', 'parameters', '', 'FLOPs', ''])
    for kind, part in result.step_sizes.items():
        table.rows.append([kind, str(part.modules), *_cells(part, result)])
    return table


def _cells(part: Cost, result: Complexity) -> list[str]:
    return [
        f'{part.parameters:>11,}',
        f'{_percent(part.parameters, result.parameters):>8.3f} %',
        f'{flops_label(part.flops):>8}',
        f'{_percent(part.flops, result.flops):>8.3f} %',
    ]


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def flops_label(count: int) -> str:
    """Four digits and a unit."""
    for unit, size in (('T', 1e12), ('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if count >= size:
            return f'{count / size:.4g} {unit}'
    return str(count)


def to_json(result: Complexity, config: str, shape: tuple[int, int]) -> dict:
    """What ``--out`` holds."""
    content = dict(config=config, shape=list(shape), flop='multiply-add', **asdict(result))
    for costs in (content['parts'], content['step_sizes']):
        for cost in costs.values():
            cost['parameters_percent'] = _percent(cost['parameters'], result.parameters)
            cost['flops_percent'] = _percent(cost['flops'], result.flops)
    return content


def main(argv=None) -> None:
    args = parse_args(argv)
    cfg = load_config(args.config, args.cfg_options)
    shape = args.shape or shape_of_pictures(cfg)
    if shape is None:
        fail(f'config {args.config} does not say how large its pictures are: give --shape H W')
    if args.out is not None:
        make_folder(args.out.parent)
    model = build_model(cfg)
    try:
        with warnings.catch_warnings():
            # Tracing warns of everything that it fixes, which here is meant.
            warnings.simplefilter('ignore')
            result = measure_complexity(model, *shape)
    except ValueError as error:
        fail(f'--shape {shape[0]} {shape[1]}: {reason(error)}')

    channels, height, width = result.input_shape
    padded = '' if (height, width) == tuple(shape) else f', padded to {height} x {width}'
    regions = f', {result.proposals} proposals' if result.proposals is not None else ''
    print(f'{args.config}: {channels} x {shape[0]} x {shape[1]}{padded}{regions}\n')
    print(parts_table(result).text())
    if result.step_sizes:
        print('\n' + step_sizes_table(result).text())
    print('\n' + textwrap.fill(CONVENTION, 100))
    if result.unknown:
        listed = ', '.join(f'{name} ({calls} calls)' for name, calls in result.unknown.items())
        print(f'warning: operators counted as none, since unknown: {listed}', file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps(to_json(result, args.config, shape), indent=1) + '\n')


if __name__ == '__main__':
    main()
