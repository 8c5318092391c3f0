"""Reproduce a table: train what is missing of its runs, then print it with its spread.

A run that is finished is never repeated, one that was broken off goes on from its newest
checkpoint. Tables and figures lie in WORK_DIR/NAME.
"""

import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mmstepnet.experiments import diffusion, digits_attention, moons
from mmstepnet.experiments.experiment import Experiment
from mmstepnet.experiments.paper_tables import TABLES, PaperTable, array_script
from mmstepnet.experiments.runs import (
    Run,
    RunError,
    complete,
    finished,
    read_result,
    runs_table,
    train_command,
)
from mmstepnet.utils.command_line import fail, make_folder


def paper_table(name: str) -> Experiment:
    """The sub-command of one of ``mmstepnet.experiments.paper_tables.TABLES``."""
    table = TABLES[name]
    # Each worker takes a group of GPUs for the time of a run.
    free: queue.SimpleQueue[str] = queue.SimpleQueue()

    def arguments(parser: argparse.ArgumentParser) -> None:
        paper_arguments(parser, table)

    def runs(args: argparse.Namespace) -> list[Run]:
        settle_gpus(args, table)
        return table.runs(args.work_dir, args.data, args.methods, args.seeds)

    def workers(args: argparse.Namespace) -> int:
        groups = gpu_groups(args)
        for group in groups:
            free.put(group)
        return len(groups)

    def execute(run: Run, args: argparse.Namespace) -> dict:
        group = free.get()
        try:
            return table.execute(run, args.gpus_per_run, dict(CUDA_VISIBLE_DEVICES=group))
        finally:
            free.put(group)

    def command(run: Run, args: argparse.Namespace) -> list[str]:
        options = table.machine_options(args.gpus_per_run)
        return train_command(run, args.gpus_per_run, options)

    def summary(missing: list[Run], args: argparse.Namespace) -> str:
        text = f'{len(missing)} runs are missing'
        if table.gpu_hours:
            # Methods that are not asked for tell of the machine's speed too.
            every = table.runs(args.work_dir, [*table.columns], [*table.methods], args.seeds)
            hours = table.hours(missing, finished(every))
            text += f', about {hours:,.1f} GPU hours (an estimate)'
        return text

    return Experiment(
        help=table.title,
        runs=runs,
        execute=execute,
        tables=lambda results, args: table.tables(results, args.data, args.methods),
        arguments=arguments,
        seeds=table.seeds,
        workers=workers,
        command=command,
        summary=summary,
    )


def paper_arguments(parser: argparse.ArgumentParser, table: PaperTable) -> None:
    add = parser.add_argument
    for flag, names in (('--data', table.columns), ('--methods', table.methods)):
        add(flag, nargs='+', choices=[*names], default=[*names], metavar='NAME',
            help=f'some of {", ".join(names)} (default: all)')  # fmt: skip
    add('--gpus', type=int, help='GPUs to use, 0 for the CPU (default: all that are there)')
    add('--gpus-per-run', type=int,
        help=f'GPUs of each run, as many runs at a time as fit (default: {table.gpus_per_run} '
        f'or fewer; the batch of {table.batch_size} pictures is shared among them)')  # fmt: skip
    add('--jobs', type=int, default=table.jobs,
        help=f'runs at a time on the CPU (default: {table.jobs})')  # fmt: skip
    add('--launcher', choices=('none', 'slurm'), default='none',
        help='slurm: submit an array job with a task for each missing run')  # fmt: skip
    add('--sbatch', nargs='+', default=[], metavar='OPTION',
        help='options of that job, as "--sbatch=--partition=gpu" "--sbatch=--time=2-0"',
        action='extend')  # fmt: skip
    add('--task', type=int, help=argparse.SUPPRESS)


def settle_gpus(args: argparse.Namespace, table: PaperTable) -> None:
    """Fill in ``args.gpus`` and ``args.gpus_per_run``; ends the process where they don't fit."""
    import torch

    if args.gpus is None:
        usual = args.gpus_per_run or table.gpus_per_run
        here = 0 if args.launcher == 'slurm' else torch.cuda.device_count()
        elsewhere = args.launcher == 'slurm' or (args.dry_run and table.gpu_hours)
        args.gpus = here or (usual if elsewhere else 0)
    if args.gpus_per_run is None:
        args.gpus_per_run = table.fitting_gpus(args.gpus)
    if args.jobs < 1:
        fail(f'--jobs must be at least 1, got {args.jobs}')
    if args.gpus < 0 or not min(args.gpus, 1) <= args.gpus_per_run <= args.gpus:
        fail(
            f'--gpus must be at least 0 and --gpus-per-run between 1 and --gpus, got {args.gpus} '
            f'and {args.gpus_per_run}'
        )
    try:
        table.machine_options(args.gpus_per_run)
    except ValueError as error:
        fail(f'--gpus-per-run: {error}')
    trains_here = args.launcher == 'none' and not (args.dry_run or args.collect)
    if trains_here and args.gpus > torch.cuda.device_count():
        fail(f'--gpus is {args.gpus}, but this machine has {torch.cuda.device_count()}')


def gpu_groups(args: argparse.Namespace) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each run at the same time."""
    if args.gpus == 0:
        return [''] * args.jobs
    given = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = given.split(',') if given else [str(i) for i in range(args.gpus)]
    if len(names) < args.gpus:
        fail(f'--gpus {args.gpus}, but CUDA_VISIBLE_DEVICES={given} names only {len(names)}')
    size = args.gpus_per_run
    return [','.join(names[i : i + size]) for i in range(0, args.gpus - size + 1, size)]


def submit(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Write a Slurm array job of the missing runs and submit it; a dry run prints it."""
    missing = [i for i, run in enumerate(runs) if read_result(run) is None]
    if not missing:
        print('no run is missing')
        return
    command = [sys.executable, str(Path(__file__).resolve()), args.name]
    command += ['--work-dir', str(args.work_dir.resolve()), '--seeds', str(args.seeds)]
    command += ['--data', *args.data, '--methods', *args.methods]
    command += ['--gpus', str(args.gpus_per_run), '--gpus-per-run', str(args.gpus_per_run)]
    folder = (args.out / 'slurm').resolve()
    script = array_script(
        [*command, '--task'], missing, folder, args.name, args.gpus_per_run, options=args.sbatch
    )
    if args.dry_run:
        print(script, end='')
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f'{args.name}.sbatch'
    path.write_text(script)
    if shutil.which('sbatch') is None:
        fail(f'there is no sbatch here: on the login node of the cluster, run: sbatch {path}')
    raise SystemExit(subprocess.run(['sbatch', str(path)]).returncode)


EXPERIMENTS = {name: paper_table(name) for name in TABLES} | {
    'diffusion': diffusion.EXPERIMENT,
    'moons': moons.EXPERIMENT,
    'digits-attention': digits_attention.EXPERIMENT,
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest='name', required=True, metavar='NAME')
    for name, experiment in EXPERIMENTS.items():
        command = commands.add_parser(name, help=experiment.help, description=experiment.help)
        command.add_argument(
            '--work-dir',
            type=Path,
            default=Path('work_dirs/reproduce'),
            help='where runs and tables go (default: work_dirs/reproduce)',
        )
        command.add_argument(
            '--seeds', type=int, default=experiment.seeds, help='seeds 0 .. SEEDS - 1 of each row'
        )
        command.add_argument(
            '--collect', action='store_true', help='train nothing, print what is there'
        )
        command.add_argument(
            '--dry-run', action='store_true', help='list the runs that are missing and stop'
        )
        experiment.arguments(command)
    args = parser.parse_args()
    for flag in ('data', 'methods'):
        if len({*getattr(args, flag, ())}) < len(getattr(args, flag, ())):
            parser.error(f'--{flag} names something twice: {" ".join(getattr(args, flag))}')
    if args.seeds < 1:
        parser.error(f'--seeds must be at least 1, got {args.seeds}')
    args.out = args.work_dir / args.name
    return args


def list_missing(experiment: Experiment, runs: Sequence[Run], args: argparse.Namespace) -> None:
    missing = [run for run in runs if read_result(run) is None]
    for run in missing:
        command = experiment.command(run, args) if run.config else []
        print(f'{run.work_dir}  {shlex.join(command)}'.rstrip())
    print(experiment.summary(missing, args))


def main() -> None:
    # As Ctrl-C: what runs is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = parse_args()
    experiment = EXPERIMENTS[args.name]
    runs = experiment.runs(args)
    task = getattr(args, 'task', None)
    if task is not None:
        if not 0 <= task < len(runs):
            fail(f'--task must lie in 0..{len(runs) - 1}, got {task}')
        runs = runs[task : task + 1]
    try:
        if getattr(args, 'launcher', 'none') == 'slurm' and not args.collect:
            return submit(runs, args)
        if args.dry_run:
            return list_missing(experiment, runs, args)
        if not args.collect:
            make_folder(args.work_dir)
            complete(
                runs,
                lambda run: experiment.execute(run, args),
                workers=experiment.workers(args),
            )
        results = finished(runs)
    except RunError as error:
        fail(error)
    if task is not None:
        return
    if not results:
        fail(f'no run of {args.name} is finished in {args.work_dir}: run it without --collect')
    runs_table(results).write(args.out / f'{args.name}_runs')
    for i, (title, table) in enumerate(experiment.tables(results, args).items()):
        table.write(args.out / (args.name if i == 0 else f'{args.name}_{i + 1}'))
        print(f'\n{title}\n\n{table.text()}')
    try:
        for file in experiment.figures(results, args.out / 'figures'):
            print(file)
    except RunError as error:
        fail(f'the tables are complete, a figure is not: {error}')


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        print('\ninterrupted; the same command goes on', file=sys.stderr)
        raise SystemExit(130) from None
