"""What a step size costs: training step, inference, deployed inference and memory.

All models are measured in one run, one after the other in every round, each round in another
order, so that whatever else the machine does meets all of them alike. A figure is the median over
rounds of the ratio to MMDetection's plain ResNet in the same round, with the quartiles as its
spread; `org again` is that ResNet a second time, the yardstick for all differences. A training step
is forward, backward and SGD. Weights are random; a network's speed doesn't depend on them.
"""

import argparse
import copy
import gc
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from mmstepnet.models import StepResNet, switch_to_deploy
from mmstepnet.models.layers import ResidualStep
from mmstepnet.utils.command_line import usable_device, use_device
from mmstepnet.visualization.figures import COLORS, GREY, new_figure, save_figure, styled

BASELINE = 'org'
# The same network once more: how far two equal ones lie apart is what the measurement can't see.
AGAIN = 'org again'
STEP_SIZES = {
    'stepnet': 'StepNetAdaptor',
    'se': 'SqueezeExcitation',
    'eca': 'ECA',
    'cbam': 'CBAM',
    'srm': 'SRM',
    'fca': 'FCA',
    'sge': 'SGE',
}
TIMM_ATTENTION = {'timm se': 'se', 'timm eca': 'eca'}
MODELS = (BASELINE, AGAIN, 'no plugin', *STEP_SIZES, *TIMM_ATTENTION, 'mmpretrain se')
PHASES = {'training': 'training step', 'inference': 'inference', 'deployed': 'deployed inference'}
FUSED = {'auto': None, 'always': True, 'never': False}
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}
SWEEP_MODELS = (BASELINE, 'stepnet', 'se')


def build(name: str, depth: int) -> nn.Module:
    """A ResNet of this depth, from feature extractors that all return maps and have no head."""
    if name in (BASELINE, AGAIN):
        from mmdet.models.backbones import ResNet

        return ResNet(depth, norm_eval=False)
    if name == 'mmpretrain se':
        from mmpretrain.models.backbones import SEResNet

        return SEResNet(depth, norm_eval=False)
    if name in TIMM_ATTENTION:
        from timm.models.resnet import Bottleneck, ResNet

        layers = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}[depth]
        attention = dict(attn_layer=TIMM_ATTENTION[name])
        model = ResNet(Bottleneck, layers, num_classes=0, global_pool='', block_args=attention)
        return model
    plugins = None
    if name in STEP_SIZES:
        plugins = [dict(cfg=dict(type=f'mmstepnet.{STEP_SIZES[name]}'))]
    return StepResNet(depth, norm_eval=False, plugins=plugins)


class Subject:
    """One model and what is measured of it."""

    def __init__(
        self, name: str, depth: int, inputs: Tensor, channels_last: bool, clock: str = 'wall'
    ):
        self.clock = CLOCKS[clock]
        form = torch.channels_last if channels_last else torch.contiguous_format
        self.model = build(name, depth).to(inputs.device, memory_format=form)
        # MMDetection's eval() returns nothing.
        self.model.eval()
        self.deployed = switch_to_deploy(copy.deepcopy(self.model))
        self.inputs = inputs
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)
        with torch.inference_mode():
            want, got = self._last(self.model), self._last(self.deployed)
        error = float((got - want).norm() / want.norm())
        if not error < 1e-3:
            raise RuntimeError(f'{name}: folding changed the outputs by a relative {error:.1e}')

    def _last(self, model: nn.Module) -> Tensor:
        out = model(self.inputs)
        return out if isinstance(out, Tensor) else out[-1]

    def training(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        self._last(self.model).mean().backward()
        self.optimizer.step()

    @torch.inference_mode()
    def inference(self) -> None:
        self.model.eval()
        self._last(self.model)

    @torch.inference_mode()
    def deployed_inference(self) -> None:
        self._last(self.deployed)

    def seconds(self, phase: str) -> float:
        """Time of one run; the GPU's work is waited for."""
        run = dict(
            training=self.training, inference=self.inference, deployed=self.deployed_inference
        )[phase]
        synchronize(self.inputs)
        start = self.clock()
        run()
        synchronize(self.inputs)
        return self.clock() - start


def synchronize(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize()


def peak_of_allocations(run: Callable[[], None]) -> int:
    """The most bytes that torch's CPU allocator held at once within ``run``, above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == '[memory]']
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_memory(model: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> int:
    """Bytes held at once in ``run``, weights, gradients and momentum included."""
    state = [*model.parameters(), *model.buffers()]
    state += [v for s in optimizer.state.values() for v in s.values() if v is not None]
    resident = sum(t.numel() * t.element_size() for t in state)
    optimizer.zero_grad()
    gc.collect()
    if not state[0].is_cuda:
        return resident + peak_of_allocations(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return resident + torch.cuda.max_memory_allocated() - before


def measure(
    names: tuple[str, ...], depth: int, inputs: Tensor, args: argparse.Namespace, rounds: int
) -> dict[str, dict]:
    """Times in seconds by model and phase, one entry a round, and peak memory in bytes."""
    subjects = {
        name: Subject(name, depth, inputs, args.channels_last, args.clock) for name in names
    }
    times = {name: {phase: [] for phase in PHASES} for name in names}
    for i in range(-args.warm_up, rounds):
        order = list(names)
        order = order[i % len(order) :] + order[: i % len(order)]
        for phase in PHASES:
            for name in order:
                seconds = subjects[name].seconds(phase)
                if i >= 0:
                    times[name][phase].append(seconds)
        print(f'  round {i + 1} of {rounds}', file=sys.stderr, flush=True)
    return {
        name: dict(
            times=times[name],
            peak_memory=peak_memory(subject.model, subject.optimizer, subject.training),
        )
        for name, subject in subjects.items()
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method='inclusive')
    return low, middle, high


def summarise(measured: dict[str, dict]) -> dict[str, dict]:
    """Median seconds, and quartiles of the ratio to the baseline of the same round."""
    base = measured[BASELINE]
    table = {}
    for name, entry in measured.items():
        row = dict(memory=entry['peak_memory'] / base['peak_memory'])
        row['memory_mib'] = entry['peak_memory'] / 2**20
        for phase in PHASES:
            pairs = zip(entry['times'][phase], base['times'][phase], strict=True)
            row[phase] = quartiles([a / b for a, b in pairs])
            row[f'{phase}_seconds'] = statistics.median(entry['times'][phase])
        table[name] = row
    return table


def markdown(table: dict[str, dict]) -> str:
    """The table as it stands in the documentation."""

    def ratio(values):
        low, middle, high = values
        return f'{middle:.3f} ({low:.3f} .. {high:.3f})'

    lines = [
        '| model | training step | inference | deployed inference | peak training memory |',
        '|---|---|---|---|---|',
    ]
    for name, row in table.items():
        cells = [ratio(row[phase]) for phase in PHASES]
        cells.append(f'{row["memory"]:.3f} ({row["memory_mib"]:.0f} MiB)')
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    base = table[BASELINE]
    seconds = ', '.join(f'{PHASES[p]} {base[f"{p}_seconds"] * 1e3:.0f} ms' for p in PHASES)
    lines.append(f'\n{BASELINE} takes: {seconds}.')
    return '\n'.join(lines)


@styled
def figure_of(table: dict[str, dict], sweeps: dict[str, dict]):
    """Ratio to the baseline with quartiles, model by model, and against size, batch and depth."""
    names = [name for name in table if name != BASELINE]
    figure = new_figure(0.19 * len(names) + 0.9 + 1.5 * bool(sweeps))
    grid = figure.add_gridspec(
        2 if sweeps else 1,
        max(1, len(sweeps)),
        height_ratios=[0.19 * len(names) + 0.7, 1.3] if sweeps else None,
    )
    axes = figure.add_subplot(grid[0, :])
    for k, (phase, label) in enumerate(PHASES.items()):
        rows = [table[name][phase] for name in names]
        position = [i + 0.22 * (k - 1) for i in range(len(names))]
        middle = [m for _, m, _ in rows]
        spread = [[m - low for low, m, _ in rows], [high - m for _, m, high in rows]]
        axes.errorbar(
            middle,
            position,
            xerr=spread,
            fmt='os^'[k],
            markersize=3,
            linewidth=0.8,
            color=COLORS[k],
            label=label,
        )
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel('time relative to the plain ResNet')
    axes.grid(axis='x')
    axes.legend(loc='lower center', bbox_to_anchor=(0.4, 1), ncols=3, columnspacing=0.8)
    first = None
    for k, (what, points) in enumerate(sweeps.items()):
        first = axes = figure.add_subplot(grid[1, k], sharey=first)
        for j, name in enumerate(n for n in SWEEP_MODELS if n != BASELINE):
            low, middle, high = zip(
                *(rows[name]['training'] for rows in points.values()), strict=True
            )
            axes.errorbar(
                [k + 0.08 * j for k in range(len(points))],
                middle,
                yerr=[
                    [m - a for m, a in zip(middle, low, strict=True)],
                    [b - m for m, b in zip(middle, high, strict=True)],
                ],
                fmt='os'[j] + '-',
                linewidth=0.8,
                color=COLORS[3 + j],
                markersize=3,
                label=name,
            )
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(points)), list(points))
        axes.set_xlabel(what)
        axes.set_xlim(-0.3, len(points) - 0.7)
        # Room for the legend below the curves.
        axes.set_ylim(bottom=0.78)
        if k == 0:
            axes.set_ylabel('training step')
            axes.legend(loc='lower right', handlelength=1.2, borderpad=0.1)
        else:
            axes.tick_params(labelleft=False)
    return figure


def package_versions() -> dict[str, str]:
    found = {}
    for name in ('torch', 'mmcv', 'mmdet', 'mmpretrain', 'timm'):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = 'missing'
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--models', nargs='+', default=list(MODELS), choices=MODELS, help='default: all'
    )
    parser.add_argument(
        '--depth', type=int, default=50, choices=(50, 101, 152), help='of the ResNets (default: 50)'
    )
    parser.add_argument('--batch', type=int, default=8, help='pictures (default: 8)')
    parser.add_argument('--size', type=int, default=160, help='side of the pictures')
    parser.add_argument('--rounds', type=int, default=7, help='that count')
    parser.add_argument('--warm-up', type=int, default=1, help='rounds that do not count')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument(
        '--device', type=usable_device, default='cuda' if torch.cuda.is_available() else 'cpu'
    )
    parser.add_argument(
        '--clock',
        default='wall',
        choices=CLOCKS,
        help='cpu: processor time of all threads, for a CPU that others use at the same time',
    )
    parser.add_argument('--channels-last', action='store_true', help='models and maps in it')
    parser.add_argument(
        '--fused',
        default='auto',
        choices=FUSED,
        help='whether training steps of step sizes that allow it are fused (default: on CPUs)',
    )
    parser.add_argument(
        '--sweep', action='store_true', help='also against size, batch and depth (few rounds)'
    )
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/benchmark/benchmark'), help='without ending'
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f'--rounds must be at least 2 for a spread, got {args.rounds}')
    if args.size < 32:
        parser.error(f'--size must be at least 32, got {args.size}')
    for name in ('batch', 'threads'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} must be at least 1, got {getattr(args, name)}')
    args.models = tuple(dict.fromkeys([BASELINE, *args.models]))
    return args


def main() -> None:
    args = parse_args()
    logging.disable(logging.INFO)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    ResidualStep.fuse = FUSED[args.fused]
    use_device(args.device)

    def measured(names, depth, batch, size, rounds):
        print(f'depth {depth}, batch {batch}, {size} px', file=sys.stderr)
        inputs = torch.randn(batch, 3, size, size, device=args.device)
        if args.channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        return measure(names, depth, inputs, args, rounds)

    main_times = measured(args.models, args.depth, args.batch, args.size, args.rounds)
    table = summarise(main_times)
    sweeps = {}
    if args.sweep:
        size, batch, few = args.size, args.batch, max(2, min(args.rounds, 5))
        given = (args.depth, batch, size)
        points = {
            'size (px)': {
                s: (args.depth, batch, s) for s in (max(32, size * 3 // 5 // 32 * 32), size)
            },
            'batch': {b: (args.depth, b, size) for b in (max(1, batch // 4), batch)},
            'depth': {d: (d, batch, size) for d in (50, 101)},
        }
        known = {given: table}
        for what, settings in points.items():
            sweeps[what] = {}
            for label, setting in settings.items():
                if setting not in known or not set(SWEEP_MODELS) <= set(known[setting]):
                    known[setting] = summarise(measured(SWEEP_MODELS, *setting, few))
                rows = known[setting]
                sweeps[what][label] = {name: rows[name] for name in SWEEP_MODELS}

    result = dict(
        command=' '.join(['python', *sys.argv]),
        machine=dict(
            device=platform.machine() if args.device == 'cpu' else torch.cuda.get_device_name(),
            threads=torch.get_num_threads(),
        ),
        packages=package_versions(),
        settings={k: v for k, v in vars(args).items() if k != 'out'},
        table=table,
        times={name: entry['times'] for name, entry in main_times.items()},
        sweeps=sweeps,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix('.json').write_text(json.dumps(result, indent=1) + '\n')
    args.out.with_suffix('.md').write_text(markdown(table) + '\n')
    save_figure(figure_of(table, sweeps), args.out, formats=('png', 'svg'))
    print(markdown(table))
    for what, points in sweeps.items():
        for label, rows in points.items():
            ratios = ', '.join(
                f'{name} {rows[name]["training"][1]:.3f} / {rows[name]["inference"][1]:.3f}'
                for name in SWEEP_MODELS
                if name != BASELINE
            )
            print(f'{what} {label}: training / inference {ratios}')


if __name__ == '__main__':
    main()
