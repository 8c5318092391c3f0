"""STL-10 in the binary format in which it is published.

Coates, Lee, Ng: An Analysis of Single Layer Networks in Unsupervised Feature Learning, AISTATS
2011, https://cs.stanford.edu/~acoates/stl10/.
"""

import hashlib
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.dist import barrier, is_main_process

from mmstepnet.registry import DATASETS

URL = 'http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz'
FOLDER = 'stl10_binary'
_ARCHIVE_MD5 = '91f7769df0f17e558f3565bffb0c7dfb'
_SIDE = 96
_PICTURE_BYTES = 3 * _SIDE * _SIDE
_NUM_FOLDS = 10


@DATASETS.register_module()
class STL10(BaseDataset):
    """The labelled part of STL-10: 5,000 training and 8,000 test pictures of 96x96, ten classes.

    Reads ``DATA_ROOT/stl10_binary/{train,test}_{X,y}.bin`` as they come out of the published
    archive, and checks sizes and MD5 sums first.

    Args:
        data_root: Folder that holds or gets ``stl10_binary``.
        split: ``'train'`` or ``'test'``.
        fold: 0 to 9 takes one of the ten predefined folds of 1,000 training pictures (needs
            ``fold_indices.txt``); None takes all.
        download: Fetch the archive (2.6 GB) where a file of the split is missing.
        pipeline: Transforms; a sample starts with ``img``, (96, 96, 3) uint8 RGB, and ``gt_label``.
        **kwargs: As for ``mmengine.dataset.BaseDataset``.

    Raises:
        ValueError: Unknown ``split`` or ``fold``; a file that is truncated or damaged.
        FileNotFoundError: A file is missing and cannot be or must not be downloaded.
    """

    METAINFO = dict(
        classes=(
            'airplane', 'bird', 'car', 'cat', 'deer', 'dog', 'horse', 'monkey', 'ship', 'truck'
        )
    )  # fmt: skip
    # Pictures, MD5 of X and of y.
    files = {
        'train': (5000, '918c2871b30a85fa023e0c44e0bee87f', '5a34089d4802c674881badbb80307741'),
        'test': (8000, '7f263ba9f9e0b06b93213547f721ac82', '36f9794fa4beb8a2c72628de14fa638e'),
    }

    def __init__(
        self,
        data_root: str,
        split: str = 'train',
        fold: int | None = None,
        download: bool = True,
        pipeline=(),
        **kwargs,
    ):
        if split not in self.files:
            raise ValueError(f"split={split!r} must be 'train' or 'test'")
        is_fold = isinstance(fold, int) and not isinstance(fold, bool) and 0 <= fold < _NUM_FOLDS
        if fold is not None and (split != 'train' or not is_fold):
            raise ValueError(
                f"fold={fold!r} must be None or one of 0..{_NUM_FOLDS - 1} with split='train' "
                f'(given: {split!r})'
            )
        self.split = split
        self.fold = fold
        self.download = download
        super().__init__(data_root=data_root, pipeline=list(pipeline), **kwargs)

    def _path(self, name: str) -> Path:
        return Path(self.data_root, FOLDER, name).expanduser()

    def load_data_list(self) -> list[dict]:
        """Read the split."""
        names = [f'{self.split}_X.bin', f'{self.split}_y.bin']
        if self.fold is not None:
            names.append('fold_indices.txt')
        if self.download and is_main_process():
            missing = [name for name in names if not self._path(name).is_file()]
            if missing:
                _download(self._path('').parent, missing[0])
        barrier()
        for name in names:
            if not self._path(name).is_file():
                raise FileNotFoundError(f'{self._path(name)} is missing: {_advice(self.data_root)}')

        count, md5_x, md5_y = self.files[self.split]
        pixels = self._read(names[0], count * _PICTURE_BYTES, md5_x)
        labels = self._read(names[1], count, md5_y).astype(int) - 1
        # Columns of each colour one after the other.
        pictures = pixels.reshape(count, 3, _SIDE, _SIDE).transpose(0, 3, 2, 1)
        kept = range(count) if self.fold is None else self._fold_indices(count)
        size = (_SIDE, _SIDE)
        return [
            dict(
                img=np.ascontiguousarray(pictures[i]),
                gt_label=int(labels[i]),
                img_shape=size,
                ori_shape=size,
            )
            for i in kept
        ]

    def _read(self, name: str, num_bytes: int, md5: str) -> np.ndarray:
        path = self._path(name)
        size = path.stat().st_size
        if size != num_bytes:
            what = 'truncated' if size < num_bytes else 'too long'
            raise ValueError(
                f'{path} is {what}: {size} bytes instead of {num_bytes}. {_advice(self.data_root)}'
            )
        content = path.read_bytes()
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            raise ValueError(
                f'{path} is damaged: its MD5 sum is not {md5}. {_advice(self.data_root)}'
            )
        return np.frombuffer(content, np.uint8)

    def _fold_indices(self, count: int) -> list[int]:
        path = self._path('fold_indices.txt')
        lines = path.read_text().splitlines()
        try:
            indices = [int(word) for word in lines[self.fold].split()]
        except (IndexError, ValueError) as error:
            raise ValueError(
                f'{path} must hold {_NUM_FOLDS} lines of picture numbers, line {self.fold + 1} '
                'can not be read'
            ) from error
        if not indices or not all(0 <= i < count for i in indices):
            raise ValueError(f'{path}, line {self.fold + 1}: numbers must lie in 0..{count - 1}')
        return indices


def _advice(data_root: str) -> str:
    return (
        f'download {URL} (2.6 GB) and unpack it in {data_root or "."}, so that it holds {FOLDER}/'
    )


def _download(root: Path, wanted: str) -> None:
    """Fetch the archive, check it and unpack it; what was there stays until the new is whole."""
    root.mkdir(parents=True, exist_ok=True)
    print(f'{root / FOLDER / wanted} is missing: downloading {URL} (2.6 GB)', flush=True)
    folder = root / 'stl10_partial'
    # Of a download that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        archive = folder / 'stl10_binary.tar.gz'
        md5 = hashlib.md5(usedforsecurity=False)
        try:
            with urllib.request.urlopen(URL, timeout=30) as source, archive.open('wb') as target:
                while block := source.read(1 << 20):
                    md5.update(block)
                    target.write(block)
        except OSError as error:
            raise FileNotFoundError(
                f'{root / FOLDER / wanted} is missing and {URL} can not be reached ({error}): '
                f'{_advice(str(root))}'
            ) from error
        if md5.hexdigest() != _ARCHIVE_MD5:
            raise ValueError(
                f'the archive from {URL} arrived damaged (MD5 {md5.hexdigest()} instead of '
                f'{_ARCHIVE_MD5}): try again, or {_advice(str(root))}'
            )
        (root / FOLDER).mkdir(exist_ok=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if not member.isfile() or name == 'unlabeled_X.bin':
                    continue
                with tar.extractfile(member) as source, (folder / name).open('wb') as target:
                    shutil.copyfileobj(source, target)
                os.replace(folder / name, root / FOLDER / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
