"""Pictures with true and predicted boxes that are large enough to be read.

Not imported with the package, since it needs MMDetection: a config that uses it names this module
in ``custom_imports``.
"""

import mmcv
import numpy as np
from mmdet.engine.hooks import DetVisualizationHook
from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer

from mmstepnet.registry import HOOKS, VISUALIZERS


@VISUALIZERS.register_module()
class EnlargingDetVisualizer(DetLocalVisualizer):
    """MMDetection's visualizer, which enlarges small pictures before it draws on them.

    On a picture of 128 pixels, lines and text of the usual size hide what they are about.

    Args:
        name: Name of the instance.
        min_edge: Pictures whose longer edge has fewer pixels are enlarged by the smallest whole
            number that brings them there.
        min_font_size: Labels are at least this large; MMDetection's shrink with the box, down to 6.
        **kwargs: As for ``mmdet.DetLocalVisualizer``.
    """

    def __init__(
        self,
        name: str = 'visualizer',
        *args,
        min_edge: int = 512,
        min_font_size: int = 18,
        **kwargs,
    ):
        super().__init__(name, *args, **kwargs)
        if min_edge < 1:
            raise ValueError(f'min_edge must be at least 1, got {min_edge!r}')
        self.min_edge = min_edge
        self.min_font_size = min_font_size

    def draw_texts(self, texts, positions, font_sizes=None, **kwargs):
        """See the base class."""
        if isinstance(font_sizes, int):
            font_sizes = max(font_sizes, self.min_font_size)
        return super().draw_texts(texts, positions, font_sizes=font_sizes, **kwargs)

    def add_datasample(
        self,
        name: str,
        image: np.ndarray,
        data_sample: DetDataSample | None = None,
        *args,
        **kwargs,
    ) -> None:
        """Draw true boxes on the left, predicted boxes on the right; see the base class.

        Args:
            name: Identifier of the picture.
            image: (H, W, 3) RGB.
            data_sample: Boxes in pixels of ``image``; it isn't changed.
        """
        height, width = image.shape[:2]
        factor = -(-self.min_edge // max(height, width))
        if factor > 1:
            image = mmcv.imresize(image, (width * factor, height * factor), interpolation='bicubic')
            data_sample = _enlarge(data_sample, factor)
        super().add_datasample(name, image, data_sample, *args, **kwargs)


def _enlarge(data_sample: DetDataSample | None, factor: int) -> DetDataSample | None:
    if data_sample is None:
        return None
    data_sample = data_sample.clone()
    for key in ('gt_instances', 'pred_instances'):
        if key in data_sample:
            instances = data_sample.get(key).clone()
            boxes = getattr(instances.bboxes, 'tensor', instances.bboxes)
            instances.bboxes = boxes * factor
            if 'masks' in instances:
                instances.masks = _enlarge_masks(instances.masks, factor)
            setattr(data_sample, key, instances)
    return data_sample


def _enlarge_masks(masks, factor: int):
    if hasattr(masks, 'rescale'):  # MMDetection's structures, of true objects
        return masks.rescale(factor)
    return masks.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


@HOOKS.register_module()
class IntervalDetVisualizationHook(DetVisualizationHook):
    """MMDetection's hook with an ``interval`` for test pictures too; its own one draws them all."""

    _passed = 0

    def after_test_iter(self, runner, batch_idx, data_batch, outputs) -> None:
        """See the base class."""
        drawn = [sample for i, sample in enumerate(outputs, self._passed) if i % self.interval == 0]
        self._passed += len(outputs)
        super().after_test_iter(runner, batch_idx, data_batch, drawn)
