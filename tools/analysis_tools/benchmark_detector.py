"""Time and memory of whole detectors' training iterations, in one run, relative to the first one.

A training iteration is forward, losses, backward and SGD on random pictures with random boxes, the
same for all configs, which take turns in every round. Weights are random: speed hardly depends on
them, except that random proposals make a two-stage head work at its full number of regions.
"""

import argparse
import copy
import json
import logging
import sys
from pathlib import Path

import torch
from benchmark import CLOCKS, package_versions, peak_memory, quartiles, synchronize
from torch import nn

from mmstepnet.engine.runner import to_channels_last
from mmstepnet.utils.command_line import (
    build_model,
    fail,
    library,
    load_config,
    usable_device,
    use_device,
)
from mmstepnet.utils.text_table import Table


class Detector:
    """A model of a config, and its training iteration."""

    def __init__(self, config: str, batch: int, size: tuple[int, int], device: str):
        from mmdet.testing import demo_mm_inputs

        cfg = load_config(config)
        if library(cfg) != 'mmdet':
            fail(f'{config} is no config of a detector')
        # A pretrained file would have to be there, and changes no speed.
        forget_pretrained(cfg.model)
        model = build_model(cfg)
        if cfg.get('runner_type', '').endswith('ChannelsLastRunner'):
            model = to_channels_last(model)
        self.model: nn.Module = model.to(device).train()
        with_mask = bool(getattr(getattr(model, 'roi_head', None), 'with_mask', False))
        self.data = demo_mm_inputs(
            batch, (3, *size), num_items=[10] * batch, num_classes=3, with_mask=with_mask
        )
        self.optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=1e-6, momentum=0.9
        )

    def iteration(self) -> None:
        """Forward, backward and a step of the optimiser."""
        torch.manual_seed(0)  # the samplers' draws
        data = self.model.data_preprocessor(copy.deepcopy(self.data), training=True)
        self.optimizer.zero_grad()
        loss, _ = self.model.parse_losses(self.model(**data, mode='loss'))
        loss.backward()
        self.optimizer.step()

    def seconds(self, clock: str) -> float:
        """Time of an iteration; the GPU's work is waited for."""
        like = next(self.model.parameters())
        synchronize(like)
        start = CLOCKS[clock]()
        self.iteration()
        synchronize(like)
        return CLOCKS[clock]() - start


def forget_pretrained(node: object) -> None:
    """Remove every ``init_cfg`` that names a file."""
    if isinstance(node, list | tuple):
        for item in node:
            forget_pretrained(item)
    elif isinstance(node, dict):
        if (node.get('init_cfg') or {}) and 'checkpoint' in str(node['init_cfg']):
            node['init_cfg'] = None
        for value in node.values():
            forget_pretrained(value)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('configs', nargs='+', help='the first is what the others are held against')
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument(
        '--size', type=int, nargs=2, default=(800, 1344), metavar=('HEIGHT', 'WIDTH'),
        help='of the padded pictures (default: 800 1344, as COCO has it at 800x1333)',
    )  # fmt: skip
    parser.add_argument('--rounds', type=int, default=5, help='that count')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument(
        '--device', type=usable_device, default='cuda' if torch.cuda.is_available() else 'cpu'
    )
    parser.add_argument('--clock', default='wall', choices=CLOCKS)
    parser.add_argument('--out', type=Path, help='JSON file with every time')
    args = parser.parse_args()
    for name, least in (('rounds', 2), ('batch', 1), ('threads', 1)):
        if getattr(args, name) < least:
            parser.error(f'--{name} must be at least {least}, got {getattr(args, name)}')
    if any(side % 32 or side < 32 for side in args.size):
        parser.error(f'--size must be multiples of 32, got {args.size[0]} {args.size[1]}')
    return args


def main() -> None:
    args = parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(args.threads)
    use_device(args.device)
    names = list(dict.fromkeys(args.configs))
    detectors = {name: Detector(name, args.batch, args.size, args.device) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-1, args.rounds):
        turn = i % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = detectors[name].seconds(args.clock)
            if i >= 0:
                times[name].append(seconds)
        print(f'  round {i + 1} of {args.rounds}', file=sys.stderr, flush=True)
    memory = {
        name: peak_memory(detector.model, detector.optimizer, detector.iteration)
        for name, detector in detectors.items()
    }

    table = Table(['config', 'iteration (s)', 'relative', 'quartiles', 'peak memory', 'relative'])
    first = names[0]
    for name in names:
        low, middle, high = quartiles(
            [a / b for a, b in zip(times[name], times[first], strict=True)]
        )
        _, seconds, _ = quartiles(times[name])
        table.rows.append(
            [
                Path(name).stem,
                f'{seconds:.2f}',
                f'{middle:.3f}',
                f'{low:.3f} .. {high:.3f}',
                f'{memory[name] / 2**20:.0f} MiB',
                f'{memory[name] / memory[first]:.3f}',
            ]
        )
    print(table.markdown())
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: v for k, v in vars(args).items() if k != 'out'}
        result = dict(settings=settings, packages=package_versions(), times=times, memory=memory)
        args.out.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
