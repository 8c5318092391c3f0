"""scikit-learn's handwritten digits for classification: real data that needs no download."""

import functools

import numpy as np
from mmengine.dataset import BaseDataset

from mmstepnet.registry import DATASETS

_TEST_SIZE = 450
_LEVELS = 16


@DATASETS.register_module()
class Digits(BaseDataset):
    """The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn (UCI, Alpaydin 1998).

    They stand in the order in which people wrote them. The first 1,347 are for training and the
    last 450 for testing, so that nearly all test digits come from hands never seen in training.

    Args:
        split: ``'train'`` or ``'test'``.
        train_per_class: Keep so many training digits of each class, drawn with ``seed``; None
            keeps all. The test split is not affected.
        noise: Standard deviation of Gaussian noise that every picture of the split gets once,
            as a fraction of the range from black to white.
        seed: Of that choice and of the noise.
        pipeline: Transforms; a sample starts with ``img``, (8, 8, 1) uint8 with 0 for paper and
            255 for ink, and ``gt_label``.
        **kwargs: As for ``mmengine.dataset.BaseDataset``.

    Raises:
        ValueError: On an unknown ``split``, on a ``train_per_class`` that the classes don't have,
            and on negative ``noise``.
    """

    METAINFO = dict(classes=tuple('0123456789'))

    def __init__(
        self,
        split: str = 'train',
        train_per_class: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
        pipeline=(),
        **kwargs,
    ):
        if split not in ('train', 'test'):
            raise ValueError(f"split={split!r} must be 'train' or 'test'")
        if noise < 0:
            raise ValueError(f'noise={noise} must not be negative')
        self.split = split
        self.train_per_class = train_per_class
        self.noise = noise
        self.seed = seed
        super().__init__(pipeline=list(pipeline), **kwargs)

    def load_data_list(self) -> list[dict]:
        """Make the samples."""
        images, labels = _load_digits()
        part = slice(None, -_TEST_SIZE) if self.split == 'train' else slice(-_TEST_SIZE, None)
        images, labels = images[part], labels[part]
        rng = np.random.default_rng([self.seed, self.split == 'test'])
        if self.split == 'train' and self.train_per_class is not None:
            kept = self._choose(labels, rng)
            images, labels = images[kept], labels[kept]
        noise = rng.normal(0, self.noise, images.shape)
        pixels = np.clip(images / _LEVELS + noise, 0, 1)
        pixels = np.round(255 * pixels).astype(np.uint8)[..., None]
        return [
            dict(img=img, gt_label=int(label), img_shape=img.shape[:2], ori_shape=img.shape[:2])
            for img, label in zip(pixels, labels, strict=True)
        ]

    def _choose(self, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        fewest = int(np.bincount(labels).min())
        if not 1 <= self.train_per_class <= fewest:
            raise ValueError(
                f'train_per_class={self.train_per_class} must lie between 1 and {fewest}, the '
                'number of training digits of the rarest class'
            )
        chosen = [
            rng.permutation(np.flatnonzero(labels == label))[: self.train_per_class]
            for label in range(10)
        ]
        return np.sort(np.concatenate(chosen))


@functools.cache
def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target
