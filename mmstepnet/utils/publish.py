"""Checkpoints to hand on: slim, with a hash in the name, on the disk either whole or not at all."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.hub import HASH_REGEX

from .checkpoint import CheckpointError, state_dict
from .files import write_whole

# What inference reads (class names and colours, the config, whether norms are folded) and how long
# the training was.
_META = (
    *('dataset_meta', 'CLASSES', 'PALETTE', 'cfg', 'deployed'),
    *('epoch', 'iter', 'mmengine_version'),
)
HASH_DIGITS = 8


def slim_checkpoint(checkpoint: Mapping) -> dict:
    """Weights and what inference needs besides; the rest of a training checkpoint is left out.

    Args:
        checkpoint: Of MMEngine's runner, or a bare state dict. Where an ``EMAHook`` wrote it, its
            ``state_dict`` holds the averaged weights, those that were validated.

    Returns:
        dict: ``state_dict`` on the CPU, each tensor with no more storage than it needs, and of
        ``meta``: ``dataset_meta`` (or the older ``CLASSES`` and ``PALETTE``), ``cfg``,
        ``deployed``, ``epoch``, ``iter`` and ``mmengine_version``, those that are there.
    """
    weights = state_dict(checkpoint)
    for key, value in weights.items():
        value = value.detach().cpu()
        is_view = value.untyped_storage().nbytes() > value.nbytes
        weights[key] = value.clone() if is_view else value
    meta = checkpoint.get('meta') or {}
    return dict(meta={key: meta[key] for key in _META if key in meta}, state_dict=weights)


def write_checkpoint(content: dict, path: str | Path, with_hash: bool = False) -> Path:
    """Write a checkpoint for ``torch.load``, the same bytes for the same content.

    Args:
        content: What the file is to hold.
        path: The file. Folders are made.
        with_hash: Put a hyphen and 8 digits of the file's SHA-256 before the suffix, as OpenMMLab
            does and as ``torch.hub.load_state_dict_from_url(..., check_hash=True)`` verifies.

    Returns:
        Path: The file written. One that was there with the same bytes stays.

    Raises:
        CheckpointError: There is another file of that name, or ``path`` has hexadecimal digits
            between a hyphen and a dot, which ``torch.hub`` would take for the hash.
        OSError: The file can't be written. Nothing is left of it.
    """
    path = Path(path)
    stream = io.BytesIO()
    torch.save(content, stream)
    written = stream.getbuffer()
    digest = hashlib.sha256(written).hexdigest()
    if with_hash:
        digits = digest[:HASH_DIGITS]
        path = path.with_name(f'{path.stem}-{digits}{path.suffix}')
        if HASH_REGEX.search(path.name)[1] != digits:
            raise CheckpointError(
                f'{path.name}: torch.hub would take {HASH_REGEX.search(path.name)[0]} for the '
                'hash; choose a name without hexadecimal digits between a hyphen and a dot'
            )
    if path.exists():
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return path
        raise CheckpointError(f'{path} exists and is something else; remove it, or choose another')
    write_whole(written, path)
    return path
