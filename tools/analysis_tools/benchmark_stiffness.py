"""What measuring stiffness costs, on this machine.

tns: exact TNS, and the same number by a grid of thresholds, time and memory.
hook: evaluation of a ResNet with and without the recording, one batch of each in turn.
"""

import argparse
import platform
import resource
import statistics
import time

import torch

from mmstepnet.evaluation.metrics import StiffnessMetric
from mmstepnet.models.backbones import StepResNet
from mmstepnet.stiffness import stiffness_degree, total_neural_stiffness
from mmstepnet.utils.command_line import usable_device, use_device


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--threads', type=int, default=1, help='of torch (default: 1)')
    parser.add_argument('--rounds', type=int, default=7, help='repetitions (default: 7)')
    commands = parser.add_subparsers(dest='command', required=True)
    tns = commands.add_parser('tns', help='exact TNS against a grid')
    tns.add_argument('--samples', type=int, default=50_000)
    tns.add_argument('--blocks', type=int, default=50)
    tns.add_argument('--grid', type=int, default=20, help='thresholds an axis (default: 20)')
    hook = commands.add_parser('hook', help='evaluation with and without recording')
    hook.add_argument('--depth', type=int, default=50)
    hook.add_argument('--batch-size', type=int, default=32)
    hook.add_argument('--size', type=int, default=224, help='height and width (default: 224)')
    hook.add_argument('--step', choices=('attention', 'unit'), default='attention')
    hook.add_argument('--step-size', default='StepNetAdaptor', help="a step size's class, or none")
    hook.add_argument('--device', type=usable_device, default='cpu')
    return parser.parse_args(argv)


def memory() -> float:
    """Largest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(function, device='cpu') -> float:
    """Seconds of one call: of this process on the CPU, so that busy neighbours count less."""
    if device == 'cpu':
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def report(name: str, seconds: list[float]) -> None:
    middle = statistics.median(seconds)
    print(f'{name:24} {middle:8.3f} s  (from {min(seconds):.3f} to {max(seconds):.3f})')


def benchmark_tns(args: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    nsi = torch.rand(args.samples, args.blocks, generator=generator, dtype=torch.float64)
    stages = torch.arange(args.blocks) * 4 // args.blocks
    before = memory()
    exact = [timed(lambda: total_neural_stiffness(nsi, stages)) for _ in range(args.rounds)]
    report(f'{args.samples} x {args.blocks}, exact', exact)
    print(f'memory on top of nsi: {memory() - before:.0f} MB')

    means = torch.stack([nsi[:, stages == s].mean(1) for s in stages], dim=1)
    extent = (nsi / means - 1).max().item(), nsi.max().item()
    middles = (torch.arange(args.grid, dtype=torch.float64) + 0.5) / args.grid
    m1, m2 = middles * extent[0], middles * extent[1]
    result: list[float] = []

    def by_grid():
        ratio = nsi / means - 1
        stiff = 0.0
        for relative in m1:
            wide = ratio >= relative
            for absolute in m2:
                stiff += (wide & (nsi >= absolute)).any(1).double().mean().item()
        result.append(stiff * extent[0] * extent[1] / args.grid**2)

    report(f'grid of {args.grid} x {args.grid}', [timed(by_grid)])
    surface = [timed(lambda: stiffness_degree(nsi, stages, m1, m2)) for _ in range(args.rounds)]
    report('delta on that grid, exact', surface)
    print(f'TNS {total_neural_stiffness(nsi, stages).mean:.6f}, by grid {result[0]:.6f}')


def benchmark_hook(args: argparse.Namespace) -> None:
    plugins = None
    if args.step_size != 'none':
        cfg = dict(type=f'mmstepnet.{args.step_size}')
        plugins = [dict(cfg=cfg, blocks='all', position='residual_step')]
    model = StepResNet(args.depth, plugins=plugins).eval().to(args.device)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    images = torch.randn(args.batch_size, 3, args.size, args.size, device=args.device)
    metric = StiffnessMetric(step=args.step)

    def plain():
        model(images)

    def recorded():
        with metric.record(model):
            model(images)
            metric.process(None, images)

    seconds: dict[str, list[float]] = dict(plain=[], recorded=[])
    with torch.inference_mode():
        plain()
        recorded()
        for number in range(args.rounds):
            pair = [('plain', plain), ('recorded', recorded)]
            for name, function in pair if number % 2 else reversed(pair):
                seconds[name].append(timed(function, args.device))
    for name, values in seconds.items():
        report(name, values)
    end = timed(lambda: metric.evaluate(size=10**9))
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    middle = statistics.median(ratios)
    print(f'recorded / plain {middle:.3f} (from {min(ratios):.3f} to {max(ratios):.3f})')
    print(f'at the end of the evaluation: {end:.3f} s')


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    use_device(getattr(args, 'device', 'cpu'))
    print(f'{platform.machine()}, {args.threads} thread(s), torch {torch.__version__}')
    benchmark_tns(args) if args.command == 'tns' else benchmark_hook(args)


if __name__ == '__main__':
    main()
