"""Checkpoint files looked at before a run: readable, of the right network, the newest good one."""

import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from mmengine.runner import CheckpointLoader, load_state_dict

from .command_line import reason

_NAME = re.compile(r'(epoch|iter)_(\d+)\.pth')


class CheckpointError(ValueError):
    """A checkpoint that can't serve; the message says why on one line."""


def read_checkpoint(path: str) -> dict:
    """Load a checkpoint on the CPU, by torch's safe loader.

    A file written by torch >= 1.6 is mapped, not read, so that looking at ``meta`` costs nothing.

    Args:
        path: A file, or an address that MMEngine understands (``https://``, ``torchvision://``).

    Returns:
        dict: MMEngine's checkpoint (``meta``, ``state_dict``, ...), or a bare state dict.

    Raises:
        CheckpointError: The file is missing, truncated, holds what the safe loader refuses, or is
            no checkpoint.
    """
    checkpoint = load_safely(path)
    weights = state_dict(checkpoint) if isinstance(checkpoint, Mapping) else {}
    if not weights or not all(isinstance(key, str) for key in weights):
        raise CheckpointError(
            f'{path} is not a checkpoint: no state dict in a {type(checkpoint).__name__}'
        )
    return checkpoint


def load_safely(path: str) -> object:
    """What :func:`read_checkpoint` loads, whatever it is.

    Raises:
        CheckpointError: The file is missing, truncated, or holds what the safe loader refuses.
    """
    path = str(path)
    if '://' in path:
        try:
            return CheckpointLoader.load_checkpoint(path, map_location='cpu')
        except Exception as error:
            raise CheckpointError(
                f'checkpoint {path} can not be loaded: {type(error).__name__}: {reason(error)}'
            ) from error
    file = Path(path).expanduser()
    if not file.is_file():
        raise CheckpointError(f'checkpoint {path} does not exist')
    is_zip = zipfile.is_zipfile(file)
    with open(file, 'rb') as stream:
        looks_like_zip = stream.read(4) == b'PK\x03\x04'
    if file.stat().st_size == 0 or (looks_like_zip and not is_zip):
        raise CheckpointError(
            f'checkpoint {path} is truncated: it ends after {file.stat().st_size} bytes'
        )
    try:
        return torch.load(file, map_location='cpu', weights_only=True, mmap=is_zip)
    except Exception as error:
        refused = re.search(r'GLOBAL ([\w.]+\.\w+)', str(error))
        what = (
            f'holds a {refused[1]}, which torch does not load safely'
            if refused
            else 'is not a checkpoint, or is damaged'
        )
        raise CheckpointError(f'{path} {what}') from error


def state_dict(checkpoint: Mapping) -> OrderedDict:
    """The tensors of a checkpoint by name, without the ``module.`` that a DDP model puts before."""
    tensors = checkpoint.get('state_dict', checkpoint)
    weights = OrderedDict(
        (re.sub(r'^module\.', '', key) if isinstance(key, str) else key, value)
        for key, value in tensors.items()
        if isinstance(value, torch.Tensor)
    )
    # Versions of the modules, by which they know what to rename.
    weights._metadata = getattr(tensors, '_metadata', OrderedDict())
    return weights


def is_deployed(checkpoint: Mapping) -> bool:
    """Whether ``to_deploy.py`` folded it: it fits a model after ``switch_to_deploy(model)``."""
    return bool((checkpoint.get('meta') or {}).get('deployed'))


def check_same_network(model: torch.nn.Module, checkpoint: Mapping, path: str) -> None:
    """For testing and resuming: the checkpoint must hold this model, nothing missing, nothing left.

    Raises:
        CheckpointError: With the number of keys that differ and an example of each kind.
    """
    weights = state_dict(checkpoint)
    try:
        # MMEngine's function also runs the renaming hooks of modules that changed with time.
        load_state_dict(model, weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(
            _other_classes(model, weights, path)
            or f'checkpoint {path} is of another network than the config: '
            + (differences(model, weights) or reason(error)[:300])
            + _folded(checkpoint)
        ) from error


def _folded(checkpoint: Mapping) -> str:
    if not is_deployed(checkpoint):
        return ''
    return (
        '. It is folded for deployment, which only tools/test.py loads; take the checkpoint that '
        'it was made from'
    )


def _other_classes(model: torch.nn.Module, weights: Mapping, path: str) -> str | None:
    """What is wrong where only the outputs of linear layers differ, as with another class count."""
    ours = model.state_dict()
    if ours.keys() != weights.keys():
        return None
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    sizes = {}
    for key, value in ours.items():
        theirs, name = weights[key], key.rpartition('.')[0]
        if theirs.shape != value.shape:
            if name not in linear or theirs.shape[1:] != value.shape[1:]:
                return None
            sizes[name] = len(theirs), len(value)
    if not sizes:
        return None
    counts = ', '.join(f'{name} has {a} outputs instead of {b}' for name, (a, b) in sizes.items())
    return (
        f'checkpoint {path} was trained on another number of classes than the config says: '
        f'{counts}. Set num_classes as it was in training'
    )


def check_same_backbone(model: torch.nn.Module, checkpoint: Mapping, path: str) -> None:
    """For ``load_from``: heads may differ and step sizes be new, but the backbone must be the same.

    Raises:
        CheckpointError: With the number of backbone keys that differ and an example of each kind.
    """
    weights = state_dict(checkpoint)
    ours = model.state_dict()
    if not any(key in ours and ours[key].shape == weights[key].shape for key in weights):
        raise CheckpointError(f'checkpoint {path} shares no weight with the model of the config')
    found = differences(model, weights, prefix='backbone.', may_miss='.step.')
    if found:
        raise CheckpointError(
            f'checkpoint {path} is of another backbone than the config: {found}'
            + (
                _folded(checkpoint)
                or '. To use a part of it, write '
                "init_cfg=dict(type='Pretrained', checkpoint=..., prefix=...) instead"
            )
        )


def differences(
    model: torch.nn.Module, weights: Mapping, prefix: str = '', may_miss: str | None = None
) -> str:
    """How many weights differ in name or shape, with an example of each kind; '' where none does.

    Args:
        model: May be on the meta device.
        weights: A state dict. Counters of batches don't count.
        prefix: Only weights whose names start so are looked at.
        may_miss: Names that contain this may be missing.
    """
    ours = {key: value for key, value in model.state_dict().items() if key.startswith(prefix)}
    theirs = {key: value for key, value in weights.items() if key.startswith(prefix)}
    counter = 'num_batches_tracked'
    missing = [key for key in ours if key not in theirs and counter not in key]
    if may_miss is not None:
        missing = [key for key in missing if may_miss not in key]
    unexpected = [key for key in theirs if key not in ours and counter not in key]
    misshapen = [
        f'{key} {tuple(theirs[key].shape)} instead of {tuple(ours[key].shape)}'
        for key in ours
        if key in theirs and ours[key].shape != theirs[key].shape
    ]
    return '; '.join(
        f'{len(keys)} {kind} (first: {keys[0]})'
        for kind, keys in (
            ('missing', missing),
            ('not in the model', unexpected),
            ('of another shape', misshapen),
        )
        if keys
    )


def newest_checkpoint(work_dir: str) -> tuple[str | None, dict | None, list[str]]:
    """The newest checkpoint of a run that can be read.

    A run killed while it wrote, or a disk that was full, leaves a file that can't; the one before
    is then the newest.

    Args:
        work_dir: Where ``epoch_N.pth`` or ``iter_N.pth`` lie, or the file ``last_checkpoint`` that
            names a checkpoint elsewhere.

    Returns:
        tuple: Its path and its content (None and None where the run has no checkpoint yet), and a
        message for each newer file that can't be read.

    Raises:
        CheckpointError: There are checkpoints, but none can be read.
    """
    problems: list[str] = []
    for path in _newest_first(Path(work_dir)):
        try:
            return str(path), read_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f'no checkpoint in {work_dir} can be read: ' + '; '.join(problems))
    return None, None, problems


def _newest_first(work_dir: Path) -> Iterable[Path]:
    pointed_at = None
    pointer = work_dir / 'last_checkpoint'
    if pointer.is_file():
        text = pointer.read_text(errors='replace').strip().strip('\0')
        pointed_at = Path(text).resolve() if text else None
    found = _numbered(work_dir)
    if pointed_at is not None and pointed_at.parent != work_dir.resolve():
        # Written elsewhere (CheckpointHook's out_dir). Where the folder has checkpoints of its own,
        # the file may have been copied with them from another run, which has gone on since.
        if found:
            pointed_at = None
        else:
            found = _numbered(pointed_at.parent)
    newest_first = sorted(found, key=found.__getitem__, reverse=True)
    if pointed_at is not None and pointed_at.is_file() and pointed_at not in found:
        newest_first.insert(0, pointed_at)  # named by a template of the user's own
    return newest_first


def _numbered(folder: Path) -> dict[Path, tuple[int, float]]:
    """Checkpoints of a folder with their number and age."""
    return {
        path.resolve(): (int(match[2]), path.stat().st_mtime)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    }
