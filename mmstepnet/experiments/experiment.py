"""What ``tools/reproduce.py`` runs."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmstepnet.utils.text_table import Table

from .runs import Run, train_command


@dataclass(frozen=True)
class Experiment:
    """One sub-command.

    Args:
        help: A line about it.
        runs: The runs that the arguments ask for.
        execute: Does one run, see :func:`mmstepnet.experiments.runs.complete`.
        tables: Tables by title, from the results that are there.
        figures: Writes figures to a folder.
        arguments: Adds arguments of its own.
        seeds: Seeds by default.
        workers: Runs at the same time.
        command: The command of a run with a config.
        summary: What is to be said about the missing runs of a dry run.
    """

    help: str
    runs: Callable[[argparse.Namespace], list[Run]]
    execute: Callable[[Run, argparse.Namespace], dict]
    tables: Callable[[list[dict], argparse.Namespace], dict[str, Table]]
    figures: Callable[[list[dict], Path], list[Path]] = lambda results, out: []
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    seeds: int = 5
    workers: Callable[[argparse.Namespace], int] = lambda args: 1
    command: Callable[[Run, argparse.Namespace], list[str]] = lambda run, args: train_command(run)
    summary: Callable[[list[Run], argparse.Namespace], str] = lambda missing, args: (
        f'{len(missing)} runs are missing'
    )


def select(results: list[dict], **wanted) -> list[dict]:
    """The results whose settings are as wanted."""
    return [r for r in results if all(r['settings'][k] == v for k, v in wanted.items())]


def metric(results: list[dict], name: str) -> list[float]:
    """A metric of each result."""
    return [r['metrics'][name] for r in results]
