"""How the predictions on a few pictures change through a training."""

from collections.abc import Sequence
from pathlib import Path

from mmengine.hooks import Hook

from mmstepnet.registry import HOOKS

from .progress import steps_done, train_loop


@HOOKS.register_module()
class PredictionPicturesHook(Hook):
    """Draw a detector's predictions on the same few validation pictures after every epoch.

    Each picture goes to the visualizer's backends under a name of its own (``val_NAME``), with the
    epoch, or the iteration of an iteration-based training, as its step: in TensorBoard that is one
    slider a picture. MMDetection's ``DetVisualizationHook`` draws whichever pictures come at every
    so many iterations instead, and with ``draw=True`` all pictures of a test.

    The pictures are the first of the validation set; of several processes the first one draws
    those that it sees.

    Args:
        count: Pictures to draw.
        score_thr: Predictions with a lower score are not drawn.

    Raises:
        ValueError: ``count`` below 1, or ``score_thr`` outside [0, 1].
    """

    def __init__(self, count: int = 4, score_thr: float = 0.3):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f'count must be a positive int, got {count!r}')
        if not 0 <= score_thr <= 1:
            raise ValueError(f'score_thr must be in [0, 1], got {score_thr!r}')
        self.count = count
        self.score_thr = score_thr
        self._drawn = 0

    def before_val_epoch(self, runner) -> None:
        """Begin anew."""
        self._drawn = 0

    def after_val_iter(
        self,
        runner,
        batch_idx: int,
        data_batch: dict | None = None,
        outputs: Sequence | None = None,
    ) -> None:
        """Draw what is left to draw of this batch."""
        import mmcv

        left = self.count - self._drawn
        if runner.rank != 0 or left <= 0:
            return
        training = train_loop(runner)
        step = 0 if training is None else steps_done(training)[1]
        for sample in outputs[:left]:
            runner.visualizer.add_datasample(
                f'val_{Path(sample.img_path).stem}',
                mmcv.imread(sample.img_path, channel_order='rgb'),
                data_sample=sample,
                pred_score_thr=self.score_thr,
                step=step,
            )
        self._drawn += len(outputs[:left])
