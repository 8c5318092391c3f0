import errno
import hashlib
import os
from collections import OrderedDict

import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmstepnet.utils.checkpoint import CheckpointError
from mmstepnet.utils.publish import slim_checkpoint, write_checkpoint


@pytest.fixture
def training():
    """What a checkpoint of MMEngine's runner holds."""
    weights = torch.nn.Linear(3, 2).state_dict()
    meta = dict(dataset_meta=dict(classes=('cat', 'dog')), cfg='model = 1', epoch=12, iter=120)
    return dict(
        meta=dict(meta, seed=5, time='20260101_000000', hook_msgs=dict(last_ckpt='a.pth')),
        state_dict=weights,
        message_hub=dict(log_scalars={'train/loss': HistoryBuffer([0.5], [1])}),
        optimizer=dict(state={0: dict(momentum_buffer=torch.zeros(1000))}, param_groups=[]),
        param_schedulers=[],
        ema_state_dict={f'module.{key}': value + 1 for key, value in weights.items()},
    )


def test_weights_and_what_inference_needs_are_left(training):
    slim = slim_checkpoint(training)
    assert slim.keys() == {'meta', 'state_dict'}
    assert slim['meta'] == dict(
        dataset_meta=dict(classes=('cat', 'dog')), cfg='model = 1', epoch=12, iter=120
    )
    assert slim['state_dict'].keys() == training['state_dict'].keys()
    for key, value in training['state_dict'].items():
        assert torch.equal(slim['state_dict'][key], value)
    assert slim['state_dict']._metadata == training['state_dict']._metadata


def test_a_state_dict_alone_is_taken(training):
    slim = slim_checkpoint(training['state_dict'])
    assert slim['meta'] == {} and slim['state_dict'].keys() == {'weight', 'bias'}


def test_views_do_not_bring_what_they_are_views_of(tmp_path):
    row = torch.arange(100_000.0).view(10, -1)[3]
    path = write_checkpoint(slim_checkpoint(dict(state_dict=dict(row=row))), tmp_path / 'a.pth')
    assert path.stat().st_size < 45_000
    assert torch.equal(torch.load(path)['state_dict']['row'], row)


def test_torch_hub_verifies_the_hash_in_the_name(training, tmp_path):
    path = write_checkpoint(slim_checkpoint(training), tmp_path / 'new' / 'net.pth', with_hash=True)
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    assert path == tmp_path / 'new' / f'net-{digits}.pth'

    def download(file):
        return torch.hub.load_state_dict_from_url(
            file.as_uri(), model_dir=tmp_path / 'hub', check_hash=True, weights_only=True
        )

    assert download(path)['meta']['epoch'] == 12
    damaged = tmp_path / 'net-00000000.pth'
    damaged.write_bytes(path.read_bytes())
    with pytest.raises(RuntimeError, match='invalid hash value'):
        download(damaged)


def test_the_same_content_is_the_same_file_whatever_its_name(training, tmp_path):
    first, second = (write_checkpoint(training, tmp_path / name) for name in ('a.pth', 'long.pth'))
    assert first.read_bytes() == second.read_bytes()
    again = slim_checkpoint(torch.load(first, weights_only=True))
    mapped = slim_checkpoint(torch.load(second, weights_only=True, mmap=True))
    paths = {write_checkpoint(c, tmp_path / 'c.pth', with_hash=True) for c in (again, mapped)}
    assert len(paths) == 1


def test_another_file_is_not_overwritten(tmp_path):
    one, two = (dict(state_dict=OrderedDict(a=torch.full((2,), value))) for value in (1.0, 2.0))
    path = write_checkpoint(one, tmp_path / 'a.pth')
    written = path.stat().st_mtime_ns
    assert write_checkpoint(one, path) == path and path.stat().st_mtime_ns == written
    with pytest.raises(CheckpointError, match=r'a\.pth exists and is something else'):
        write_checkpoint(two, path)
    assert torch.load(path)['state_dict']['a'][0] == 1


@pytest.mark.parametrize('name', ['resnet-50.v2.pth', 'a-.b.pth'])
def test_names_that_hide_the_hash_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match='choose a name without hexadecimal digits'):
        write_checkpoint(dict(state_dict={}), tmp_path / name, with_hash=True)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_the_disk_is_full(tmp_path, monkeypatch):
    def full_disk(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full_disk)
    with pytest.raises(OSError, match='No space left'):
        write_checkpoint(dict(state_dict={}), tmp_path / 'a.pth')
    assert not list(tmp_path.iterdir())
