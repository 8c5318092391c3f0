"""Time metric, L2 and dot-product attention against MMPretrain's, interleaved in one run."""

import os

# OpenMP reads these when torch loads it, so they stand before every other import.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from mmpretrain.models.utils import MultiheadAttention
from torch import Tensor, nn

from mmstepnet.models.layers import MetricAttention
from mmstepnet.utils.command_line import usable_device, use_device
from mmstepnet.utils.text_table import Table


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--tokens', type=int, default=196)
    parser.add_argument('--rounds', type=int, default=21)
    parser.add_argument(
        '--device', type=usable_device, default='cuda' if torch.cuda.is_available() else 'cpu'
    )
    return parser.parse_args()


def seconds(layer: nn.Module, x: Tensor, training: bool, clock: Callable[[], float]) -> float:
    """Time of one forward pass, and backward pass in training."""
    x = x.clone().requires_grad_(training)
    start = clock()
    with torch.set_grad_enabled(training):
        out = layer(x)
        if training:
            out.sum().backward()
    return clock() - start


def main() -> None:
    args = parse_args()
    use_device(args.device)

    def clock() -> float:
        if args.device != 'cpu':
            torch.cuda.synchronize()
            return time.perf_counter()
        # What other processes take of the cores does not count.
        return time.process_time()

    table = Table(['C, heads, batch', 'layer', 'ms', 'relative', 'quartiles'])
    for dims, heads, batch in ((192, 3, 8), (384, 6, 4)):
        torch.manual_seed(0)
        layers = {
            'MMPretrain': MultiheadAttention(dims, heads),
            **{name: MetricAttention(dims, heads, kernel=name) for name in ('metric', 'l2', 'dot')},
            'two linear layers': nn.Sequential(nn.Linear(dims, dims), nn.Linear(dims, dims)),
        }
        x = torch.randn(batch, args.tokens, dims, device=args.device)
        for layer in layers.values():
            layer.to(args.device)
        for training in (False, True):
            rounds = [
                [seconds(layer, x, training, clock) for layer in layers.values()]
                for _ in range(args.rounds + 2)
            ]
            times = 1000 * np.array(rounds[2:])
            low, middle, high = np.percentile(times / times[:, :1], (25, 50, 75), axis=0)
            what = f'{dims}, {heads}, {batch}, {"training" if training else "inference"}'
            for i, name in enumerate(layers):
                table.rows.append(
                    [
                        what,
                        name,
                        f'{np.median(times[:, i]):.2f}',
                        f'{middle[i]:.2f}',
                        f'{low[i]:.2f} .. {high[i]:.2f}',
                    ]
                )
    print(table.text())


if __name__ == '__main__':
    main()
