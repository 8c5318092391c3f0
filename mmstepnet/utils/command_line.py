"""What the command line tools share: reading a config, and ending with one line on bad input."""

import argparse
import copy
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS, RUNNERS, init_default_scope
from mmengine.runner import Runner

# As argparse ends on bad arguments. tools/launch.py knows by it that all has been said.
BAD_INPUT = 2


def local_rank() -> int:
    """Number of this process on its machine, 0 without a launcher."""
    return int(os.environ.get('LOCAL_RANK', 0))


def fail(message: object) -> NoReturn:
    """End the process with exit code 2 and one message, however many processes there are.

    The first process of a machine speaks. The others wait for it: the launcher ends them as soon
    as one has ended, and they must not be the first, or the message would be lost.
    """
    if local_rank() != 0:
        wait_for_the_end()
    print(f'error: {message}', file=sys.stderr, flush=True)
    raise SystemExit(BAD_INPUT)


def wait_for_the_end() -> NoReturn:
    """Leave the explanation to another process: give the launcher time to end this one."""
    time.sleep(30)
    raise SystemExit(1)


def say(message: str) -> None:
    """Print a line, once per machine. For what happens before the runner has made its logger."""
    if local_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """An exception's message on one line (a ``KeyError``'s without the quotes around it)."""
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return ' '.join(str(text).split()) or type(error).__name__


class ArgumentParser(argparse.ArgumentParser):
    """Ends on bad arguments with one message, however many processes there are."""

    def error(self, message: str) -> NoReturn:
        if local_rank() != 0:
            wait_for_the_end()
        super().error(message)


def usable_device(name: str) -> str:
    """The ``type`` of an argument ``--device``: ``cpu``, ``cuda``, ``cuda:1``, if it is there.

    Raises:
        argparse.ArgumentTypeError: It is not; says which are.
    """
    there = ['cpu']
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        there += [kind, *(f'{kind}:{i}' for i in range(torch.accelerator.device_count()))]
    if name not in there:
        raise argparse.ArgumentTypeError(f'no {name} on this machine; it has {", ".join(there)}')
    return name


def use_device(name: str) -> None:
    """Make a GPU that was named (``cuda:1``) the one that torch waits for and asks for memory."""
    if torch.device(name).index is not None:
        torch.cuda.set_device(torch.device(name))


class SettingsAction(DictAction):
    """``mmengine.config.DictAction`` that ends as argparse does on what isn't ``KEY=VALUE``."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            try:
                super().__call__(parser, namespace, [value], option_string)
            except (ValueError, AssertionError) as error:
                what = reason(error) if '=' in value else 'it must be KEY=VALUE'
                parser.error(f'{option_string} {value}: {what}')


def add_settings_argument(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--cfg-options``, with an example in its help."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=SettingsAction,
        metavar='KEY=VALUE',
        help=f'change settings of the config, e.g. {example}',
    )


def load_config(path: str, options: dict | None = None) -> Config:
    """Read a config file and merge command line options into it; ends the process where it can't.

    Args:
        path: The config file.
        options: ``--cfg-options`` as ``SettingsAction`` parses them.
    """
    if not Path(path).is_file():
        fail(f'config {path} does not exist')
    try:
        cfg = Config.fromfile(path)
        cfg.merge_from_dict(options or {})
    except Exception as error:
        fail(f'config {path} can not be read: {type(error).__name__}: {reason(error)}')
    if 'model' not in cfg:
        fail(f'config {path} has no `model`')
    return cfg


def set_work_dir(cfg: Config, config_path: str, work_dir: str | None) -> None:
    """Settle ``cfg.work_dir``: the command line, the config, or ``work_dirs/CONFIG_NAME``."""
    cfg.work_dir = work_dir or cfg.get('work_dir') or f'./work_dirs/{Path(config_path).stem}'


def make_folder(path: str | Path) -> None:
    """Make a folder for results before the work starts; ends the process where that can't be."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        fail(f'folder {path} can not be made: {error.strerror}')
    if not os.access(path, os.W_OK):
        fail(f'folder {path} can not be written to')


def build_model(cfg: Config):
    """The config's model as built on the CPU, weights not initialised; ends the process where the
    config is at fault.

    The runner builds its own after it has made the work directory and set the seed. This one is
    for looking at a config and a checkpoint before anything is touched.
    """
    # None, as new-style configs say, leaves each registry its own scope.
    if (scope := cfg.get('default_scope', 'mmengine')) is not None:
        init_default_scope(scope)
    model = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    try:
        return MODELS.build(model)
    except (TypeError, ValueError, KeyError, AssertionError, FileNotFoundError) as error:
        fail(f'the model of {cfg.filename} can not be built: {reason(error)}')


def type_name(kind: str | type) -> str:
    """Name of a config's ``type`` without its scope; MMEngine's new-style configs hold classes."""
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def library(cfg: Config) -> str:
    """Whose config it is, ``'mmdet'`` or ``'mmpretrain'`` for instance: its ``default_scope``, or,
    in new-style ones that have none, where the model's class comes from.
    """
    if scope := cfg.get('default_scope'):
        return scope
    kind = cfg.model.get('type')
    return (kind if isinstance(kind, str) else kind.__module__).partition('.')[0]


def build_runner(cfg: Config) -> Runner:
    """The config's runner: MMEngine's, or the one that ``runner_type`` names."""
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def set_loader_defaults(loader: dict, cfg: Config) -> None:
    """What MMPretrain's own tools add to a data loader; configs of others stay as they are."""
    if library(cfg) == 'mmpretrain':
        loader.setdefault('collate_fn', dict(type='default_collate'))
        loader.setdefault('pin_memory', torch.cuda.is_available())


def check_ops(cfg: Config) -> None:
    """End the process where a detector would go to a GPU that MMCV's ops are not compiled for."""
    if library(cfg) != 'mmdet' or not torch.cuda.is_available():
        return
    from mmcv.ops import get_compiling_cuda_version

    if get_compiling_cuda_version() == 'not available':
        fail(
            'there is a GPU, but the ops of mmcv are compiled for the CPU: install nvcc and run '
            'tools/install.py again, or set CUDA_VISIBLE_DEVICES= (to nothing) to use the CPU'
        )
