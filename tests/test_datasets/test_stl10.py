import hashlib
import io
import tarfile
import urllib.error

import numpy as np
import pytest

from mmstepnet.datasets import STL10, stl10

COUNT = 4


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data set of four random pictures a split, in the published format."""
    rng = np.random.default_rng(0)
    folder = tmp_path / 'data' / 'stl10_binary'
    folder.mkdir(parents=True)
    files = {}
    for split in ('train', 'test'):
        pixels = rng.integers(0, 256, COUNT * 3 * 96 * 96, dtype=np.uint8).tobytes()
        labels = rng.permutation(np.arange(1, 11, dtype=np.uint8))[:COUNT].tobytes()
        (folder / f'{split}_X.bin').write_bytes(pixels)
        (folder / f'{split}_y.bin').write_bytes(labels)
        files[split] = COUNT, md5(pixels), md5(labels)
    (folder / 'fold_indices.txt').write_text('\n'.join(f'{i % COUNT} 1' for i in range(10)))
    (folder / 'class_names.txt').write_text('\n'.join(STL10.METAINFO['classes']))
    monkeypatch.setattr(STL10, 'files', files)
    return folder.parent


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize('split', ['train', 'test'])
def test_equals_torchvision_s(root, split, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets.STL10, '_check_integrity', lambda self: True)
    oracle = datasets.STL10(str(root), split)
    ours = STL10(str(root), split, download=False)
    assert len(ours) == len(oracle) == COUNT
    assert list(ours.metainfo['classes']) == oracle.classes
    for i, (picture, label) in enumerate(oracle):
        assert np.array_equal(ours[i]['img'], np.asarray(picture))
        assert ours[i]['gt_label'] == label


def test_published_files_are_those_that_torchvision_knows():
    from torchvision.datasets import STL10 as Oracle

    known = dict(Oracle.train_list + Oracle.test_list)
    for split, (_, md5_x, md5_y) in STL10.files.items():
        assert (md5_x, md5_y) == (known[f'{split}_X.bin'], known[f'{split}_y.bin'])
    assert (Oracle.url, Oracle.tgz_md5) == (stl10.URL, stl10._ARCHIVE_MD5)


def test_folds(root):
    whole = STL10(str(root), download=False)
    fold = STL10(str(root), fold=2, download=False)
    assert [sample['gt_label'] for sample in fold] == [whole[2]['gt_label'], whole[1]['gt_label']]
    (root / 'stl10_binary/fold_indices.txt').write_text('0 1 4\n')
    with pytest.raises(ValueError, match=r'line 1: numbers must lie in 0\.\.3'):
        STL10(str(root), fold=0, download=False)
    with pytest.raises(ValueError, match='line 2 can not be read'):
        STL10(str(root), fold=1, download=False)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda path: path.unlink(), r'test_X\.bin is missing: download http'),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), 'truncated: 110583 bytes'),
        (lambda path: path.write_bytes(bytes(COUNT * 27648)), 'damaged: its MD5'),
    ],
)
def test_bad_files_are_named(root, change, message):
    change(root / 'stl10_binary' / 'test_X.bin')
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        STL10(str(root), 'test', download=False)


def test_downloads_what_is_missing(root, tmp_path, monkeypatch):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode='w:gz') as tar:
        tar.add(root / 'stl10_binary', 'stl10_binary')
    monkeypatch.setattr(stl10, '_ARCHIVE_MD5', md5(archive.getvalue()))
    monkeypatch.setattr(
        stl10.urllib.request, 'urlopen', lambda *_, **__: io.BytesIO(archive.getvalue())
    )
    fresh = STL10(str(tmp_path / 'fresh'))
    assert np.array_equal(fresh[3]['img'], STL10(str(root))[3]['img'])
    assert sorted(p.name for p in (tmp_path / 'fresh').iterdir()) == ['stl10_binary']


def test_says_where_to_get_it_when_no_download_is_possible(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError('no network')

    monkeypatch.setattr(stl10.urllib.request, 'urlopen', refuse)
    with pytest.raises(FileNotFoundError, match=r'no network.*download http.*stl10_binary'):
        STL10(str(tmp_path))
    monkeypatch.setattr(stl10.urllib.request, 'urlopen', lambda *_, **__: io.BytesIO(b'x'))
    with pytest.raises(ValueError, match='arrived damaged'):
        STL10(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('options', [dict(split='val'), dict(fold=10), dict(split='test', fold=1)])
def test_bad_arguments(root, options):
    with pytest.raises(ValueError, match=next(reversed(options))):
        STL10(str(root), **options)
