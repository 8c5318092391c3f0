"""Stiffness reports: what was measured on one model and one data set, as a JSON file.

A report ``NAME.json`` holds the numbers per model and per block, ``NAME.npz`` beside it the NSI and
the step size of every sample. ``docs/report_format.md`` describes every key. Reading checks the
whole file, so whatever :func:`read_report` returns can be plotted and compared without further
questions.
"""

import hashlib
import itertools
import json
import math
import os
import platform
import sys
import zipfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from .checks import check_nsi, to_float64
from .total_stiffness import stiffness_degree, stiffness_proportion, total_neural_stiffness

FORMAT = 'mmstepnet.stiffness/1'
STEPS = ('attention', 'unit')

_GRID_POINTS = 41
_PACKAGES = ('mmstepnet', 'torch', 'torchvision', 'numpy', 'mmengine', 'mmcv', 'mmdet')
_PACKAGES += ('mmpretrain', 'timm')
_DESCRIPTIVE = ('model', 'config', 'checkpoint', 'dataset')
_COMPUTED = ('format', 'created', 'step', 'num_samples', 'stages', 'names', 'tns')
_COMPUTED += ('nsi_mean', 'dt_mean', 'surfaces', 'samples')


def build_report(nsi, stages, names, step, dt=None, *, m1=None, m2=None, **info):
    """Condense the per-sample measurements of one model into a report.

    Args:
        nsi (Tensor): Neural stiffness index of every sample and block, (N, L), finite.
        stages (Tensor | Sequence[int]): Stage of each block, (L,).
        names (Sequence[str]): Name of each block, L of them.
        step (str): Which step NSI is measured with, ``'attention'`` (``||f|| / ||x||``) or
            ``'unit'`` (``||f * dt|| / ||x||``).
        dt (Tensor, optional): Mean step size of every sample and block, (N, L).
        m1 (Sequence[float], optional): Relative thresholds M1 of the two surfaces. By default 41
            values from 0 to where one sample in a hundred still has a larger NSI.
        m2 (Sequence[float], optional): Absolute thresholds M2, likewise.
        **info: ``model``, ``config``, ``checkpoint``, ``dataset`` (strings or None), ``metrics``
            (the evaluation's other metrics by name), ``num_omitted`` (samples left out for NaN or
            Inf), ``versions`` (by default those of the packages loaded now), and anything else
            that JSON can hold. NaN and Inf become None.

    Returns:
        dict: The report, as documented in ``docs/report_format.md``.

    Raises:
        TypeError: If ``stages`` aren't integers.
        ValueError: If shapes disagree, ``nsi`` or ``dt`` is empty or not finite, ``step`` is
            unknown, or ``info`` holds a key that the report computes itself.
    """
    if step not in STEPS:
        raise ValueError(f'step must be one of {STEPS}, got {step!r}')
    if clash := sorted(set(info) & set(_COMPUTED)):
        raise ValueError(f'info must not hold what the report computes itself, got {clash}')
    names = [_text(name) for name in names]
    nsi, stages, _ = check_nsi(torch.as_tensor(nsi).detach().cpu(), stages, nan_policy='raise')
    shape = tuple(nsi.shape)
    if len(names) != shape[1]:
        raise ValueError(
            f'names must be one for each of the {shape[1]} blocks of nsi, got {len(names)}'
        )
    if dt is not None:
        dt = _checked_samples('dt', dt, shape)

    default_m1, default_m2 = _threshold_axes(nsi, stages)
    m1 = default_m1 if m1 is None else torch.as_tensor(m1, dtype=torch.float64)
    m2 = default_m2 if m2 is None else torch.as_tensor(m2, dtype=torch.float64)
    tns = total_neural_stiffness(nsi, stages)
    report = {
        'format': FORMAT,
        'created': datetime.now(timezone.utc).isoformat(timespec='milliseconds'),
        **{key: None if info.get(key) is None else _text(info[key]) for key in _DESCRIPTIVE},
        'step': step,
        'num_samples': len(nsi),
        'num_omitted': int(info.get('num_omitted', 0)),
        'tns': {'mean': float(tns.mean), 'std_error': _finite_or_none(float(tns.std_error))},
        'metrics': _plain(info.get('metrics') or {}),
        'stages': stages.tolist(),
        'names': names,
        'nsi_mean': nsi.mean(dim=0).tolist(),
        'dt_mean': None if dt is None else dt.mean(dim=0).tolist(),
        'surfaces': {
            'm1': m1.tolist(),
            'm2': m2.tolist(),
            'delta': stiffness_degree(nsi, stages, m1, m2).tolist(),
            'p_hat': stiffness_proportion(nsi, stages, m1, m2).tolist(),
        },
        'versions': dict(info.get('versions') or _loaded_versions()),
        'samples': None,
    }
    report.update({key: _plain(info[key]) for key in info if key not in report})
    check_report(report)
    return report


def write_report(path, report, nsi=None, dt=None):
    """Write a report, and its samples beside it, so that no reader ever meets half of it.

    Both files are written under another name, flushed to the disk and then renamed, the samples
    first. The report names the samples' SHA-256: after a crash between the two renames the old
    report is still whole, and :func:`read_samples` refuses samples that aren't its own.

    Args:
        path (str | Path): Where to write, ending in ``.json``. Missing folders are made.
        report (dict): A report of :func:`build_report`. It isn't changed.
        nsi (Tensor, optional): What the report was built from, (N, L). Without it no ``.npz`` is
            written.
        dt (Tensor, optional): Likewise, (N, L).

    Returns:
        Path: ``path``.

    Raises:
        ValueError: If ``path`` has another ending, the report is incomplete, or ``nsi`` or ``dt``
            isn't what the report describes.
    """
    path = Path(path)
    if path.suffix != '.json':
        raise ValueError(f'path must end in .json, got {str(path)!r}')
    check_report(report)
    if nsi is None and dt is not None:
        raise ValueError('dt was given without nsi: the samples file needs nsi')
    path.parent.mkdir(parents=True, exist_ok=True)

    report = {**report, 'samples': None}
    if nsi is not None:
        arrays = {'nsi': nsi} if dt is None else {'nsi': nsi, 'dt': dt}
        shape = (report['num_samples'], len(report['names']))
        arrays = {k: _checked_samples(k, v, shape).numpy() for k, v in arrays.items()}
        samples = path.with_suffix('.npz')
        digest = _replace_file(
            samples,
            lambda file: np.savez(
                file,
                stages=np.array(report['stages'], dtype=np.int64),
                names=np.array(report['names']),
                **arrays,
            ),
        )
        report['samples'] = {'file': samples.name, 'sha256': digest}
    # One key a line: surfaces are thousands of numbers, and people do open these files.
    lines = (
        f'  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}'
        for key, value in report.items()
    )
    text = '{\n' + ',\n'.join(lines) + '\n}\n'
    _replace_file(path, lambda file: file.write(text.encode()))
    return path


def read_report(path):
    """Read a report and check it.

    Args:
        path (str | Path): The ``.json`` file.

    Returns:
        dict: The report, as documented in ``docs/report_format.md``.

    Raises:
        OSError: If the file can't be read.
        ValueError: If it is truncated, of another format, or not as documented. The message names
            the file and the key.
    """
    path = Path(path)
    try:
        report = json.loads(
            path.read_text(encoding='utf-8'),
            parse_int=_parse_number,
            parse_float=_parse_number,
            parse_constant=_parse_number,
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{path}: not a complete JSON file (line {error.lineno}, column {error.colno}: '
            f'{error.msg}). It may be truncated; measure again to replace it'
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f'{path}: not a text file, so not a stiffness report') from error
    except (_NotFinite, RecursionError) as error:
        raise ValueError(f'{path}: not a stiffness report: {error}') from error
    check_report(report, source=path)
    return report


def read_samples(path):
    """Read the samples that belong to a report.

    Args:
        path (str | Path): The report's ``.json`` file.

    Returns:
        tuple[Tensor, Tensor | None]: NSI and mean step size of every sample and block, (N, L),
        float64. The second is None if no block has a step size.

    Raises:
        OSError: If a file can't be read; ``FileNotFoundError`` too if the report was written
            without samples.
        ValueError: If the samples are truncated, or aren't those of this report.
    """
    path = Path(path)
    report = read_report(path)
    if report['samples'] is None:
        raise FileNotFoundError(f'{path}: this report was written without per-sample values')
    samples = path.parent / report['samples']['file']
    with open(samples, 'rb') as file:
        if _sha256(file) != report['samples']['sha256']:
            raise ValueError(
                f'{samples}: not the samples of {path} (another checksum): it was truncated, or '
                'written by a measurement that did not finish. Measure again'
            )
    try:
        with np.load(samples, allow_pickle=False) as arrays:
            nsi = torch.from_numpy(arrays['nsi'])
            dt = torch.from_numpy(arrays['dt']) if 'dt' in arrays else None
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f'{samples}: not a samples file ({error})') from error
    shape = (report['num_samples'], len(report['names']))
    for key, value in (('nsi', nsi), ('dt', dt)):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(
                f'{samples}: key "{key}": expected shape {shape} as in {path.name}, got '
                f'{tuple(value.shape)}'
            )
    return nsi, dt


def check_report(report, source='report'):
    """Check that a report is as ``docs/report_format.md`` says.

    Keys that the format doesn't know are allowed.

    Args:
        report (dict): What to check.
        source (str | Path): The name that messages begin with.

    Raises:
        ValueError: Naming ``source``, the key, what was expected and what was found.
    """
    if not isinstance(report, dict) or 'format' not in report:
        raise ValueError(f'{source}: key "format" is missing: not a stiffness report')
    if report['format'] != FORMAT:
        raise ValueError(
            f'{source}: key "format": this version reads "{FORMAT}", got {report["format"]!r}'
        )
    check = _Checker(source)
    for key in _DESCRIPTIVE:
        check(report, key, 'a string or null', lambda v: v is None or isinstance(v, str))
    check(report, 'created', 'a date and time in ISO 8601', _is_time)
    check(report, 'step', f'one of {STEPS}', lambda v: v in STEPS)
    num_samples = check(report, 'num_samples', 'an integer >= 1', lambda v: _is_int(v) and v >= 1)
    check(report, 'num_omitted', 'an integer >= 0', lambda v: _is_int(v) and v >= 0)
    check(report, 'metrics', 'an object', lambda v: isinstance(v, dict))
    check(
        report,
        'versions',
        'an object of strings',
        lambda v: isinstance(v, dict) and all(isinstance(item, str) for item in v.values()),
    )

    names = check(report, 'names', 'a list of strings, not empty', _is_list_of(str))
    size = len(names)
    check(
        report,
        'stages',
        f'a list of {size} integers, one a name',
        lambda v: isinstance(v, list) and len(v) == size and all(map(_is_int, v)),
    )
    per_block = f'a list of {size} finite numbers, one a name'
    check(report, 'nsi_mean', per_block, lambda v: _is_vector(v, size) and min(v) >= 0)
    check(report, 'dt_mean', f'{per_block}, or null', lambda v: v is None or _is_vector(v, size))

    tns = check(report, 'tns', 'an object', lambda v: isinstance(v, dict))
    check(tns, 'tns.mean', 'a finite number >= 0', lambda v: _is_number(v) and v >= 0)
    if num_samples == 1:
        check(tns, 'tns.std_error', 'null, with one sample', lambda v: v is None)
    else:
        check(tns, 'tns.std_error', 'a finite number >= 0', lambda v: _is_number(v) and v >= 0)

    surfaces = check(report, 'surfaces', 'an object', lambda v: isinstance(v, dict))
    axis = 'a list of finite numbers >= 0, increasing, not empty'
    m1 = check(surfaces, 'surfaces.m1', axis, _is_axis)
    m2 = check(surfaces, 'surfaces.m2', axis, _is_axis)
    for key in ('surfaces.delta', 'surfaces.p_hat'):
        check(
            surfaces,
            key,
            f'{len(m1)} lists (one a value of m1) of {len(m2)} numbers (one a value of m2) in '
            '[0, 1]',
            lambda v: (
                isinstance(v, list)
                and len(v) == len(m1)
                and all(_is_vector(row, len(m2)) and min(row) >= 0 and max(row) <= 1 for row in v)
            ),
        )

    samples = check(
        report, 'samples', 'an object or null', lambda v: v is None or isinstance(v, dict)
    )
    if samples is not None:
        check(
            samples,
            'samples.file',
            'a file name without folders',
            lambda v: isinstance(v, str) and v == Path(v).name != '',
        )
        check(samples, 'samples.sha256', '64 hexadecimal digits', _is_sha256)


class _NotFinite(ValueError):
    pass


def _parse_number(text):
    # Python's reader takes NaN and Infinity, which JSON doesn't have, and integers of any length.
    if not math.isfinite(float(text)):
        shown = text if len(text) <= 20 else f'{text[:20]}...'
        raise _NotFinite(f'it holds {shown}, and every number must be finite')
    return int(text) if text.lstrip('-').isdigit() else float(text)


class _Checker:
    def __init__(self, source):
        self.source = source

    def __call__(self, parent, key, expected, is_valid):
        leaf = key.rpartition('.')[2]
        if leaf not in parent:
            raise ValueError(f'{self.source}: key "{key}" is missing (expected {expected})')
        value = parent[leaf]
        if not is_valid(value):
            shown = json.dumps(value, default=repr)
            shown = shown if len(shown) <= 80 else f'{shown[:77]}...'
            raise ValueError(f'{self.source}: key "{key}": expected {expected}, got {shown}')
        return value


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value):
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _is_vector(value, size):
    return isinstance(value, list) and len(value) == size and all(map(_is_number, value))


def _is_axis(value):
    return (
        isinstance(value, list)
        and _is_vector(value, max(len(value), 1))
        and value[0] >= 0
        and all(left < right for left, right in itertools.pairwise(value))
    )


def _is_list_of(kind):
    return lambda v: isinstance(v, list) and bool(v) and all(isinstance(item, kind) for item in v)


def _is_time(value):
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_sha256(value):
    return isinstance(value, str) and len(value) == 64 and set(value) <= set('0123456789abcdef')


def _checked_samples(key, value, shape):
    value = to_float64(key, value, dims=(2,)).detach().cpu()
    if tuple(value.shape) != shape:
        raise ValueError(
            f'{key} must have the shape {shape} of the measurement, got {tuple(value.shape)}'
        )
    if not value.isfinite().all():
        sample, block = (~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f'{key} of sample {sample}, block {block} is {value[sample, block].item()}; leave such '
            'samples out and count them in num_omitted'
        )
    return value.contiguous()


def _threshold_axes(nsi, stages):
    ratio = nsi.new_zeros(len(nsi))
    for stage in stages.unique():
        part = nsi[:, stages == stage]
        relative = part.amax(dim=1) / part.mean(dim=1) - 1
        ratio = torch.maximum(ratio, relative.nan_to_num(nan=0.0))
    return _axis(ratio), _axis(nsi.amax(dim=1))


def _axis(values):
    end = float(np.quantile(values.numpy(), 0.99))
    if end <= 1e-9:
        end = 1.0
    # Two significant digits, upwards: axes of similar models then coincide, and read well.
    unit = 10.0 ** (math.floor(math.log10(end)) - 1)
    return torch.linspace(0, math.ceil(end / unit - 1e-9) * unit, _GRID_POINTS, dtype=torch.float64)


def _plain(value):
    """Only what JSON holds: arrays become lists, NaN and Inf None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, float):
        return _finite_or_none(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    return _text(value)


def _text(value):
    # Of a path that isn't UTF-8, Python makes lone surrogates, which no file, figure or terminal
    # takes; like this they stand there as \udcXX.
    return str(value).encode(errors='backslashreplace').decode()


def _finite_or_none(value):
    return value if math.isfinite(value) else None


def _loaded_versions():
    versions = {'python': platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), '__version__', None)
        if version is not None:
            versions[name] = str(version)
    return versions


def _replace_file(path, write):
    """Write a file as a whole or not at all; return its SHA-256."""
    temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'w+b') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = _sha256(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def _sha256(file):
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
