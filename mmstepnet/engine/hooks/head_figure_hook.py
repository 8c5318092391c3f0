"""Where the heads of relative attention look, through training."""

import json
from pathlib import Path

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper

from mmstepnet.models.layers.relative_attention import RelativeAttention2d
from mmstepnet.registry import HOOKS
from mmstepnet.utils.files import write_whole


@HOOKS.register_module()
class HeadFigureHook(Hook):
    """Follow the centres and spreads of quadratic relative attention.

    Writes to ``WORK_DIR/heads``: ``heads.json`` with every layer's centres and spreads at the
    start and after each ``interval``-th epoch, a figure of the heads at those epochs
    (``epoch_N.png`` and ``.pdf``), and at the end the path of every centre (``paths``). A resumed
    training goes on with the file.

    Args:
        interval: Epochs between two looks.
        reach: Pixels shown in each direction.

    Raises:
        ValueError: Before training, if ``interval`` is below 1 or the model has no layer
            with ``position='quadratic'``.
    """

    def __init__(self, interval: int = 1, reach: float = 6.0):
        if interval < 1:
            raise ValueError(f'interval={interval} must be at least 1')
        self.interval = interval
        self.reach = reach

    @staticmethod
    def _layers(runner) -> dict[str, RelativeAttention2d]:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        return {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, RelativeAttention2d) and module.position == 'quadratic'
        }

    def before_train(self, runner) -> None:
        """Look at the start, or read what a broken-off training has written."""
        if not self._layers(runner):
            raise ValueError(
                'HeadFigureHook needs a model with RelativeAttention2d of '
                f"position='quadratic', {type(runner.model).__name__} has none"
            )
        self.folder = Path(runner.work_dir) / 'heads'
        file = self.folder / 'heads.json'
        self.records = []
        if runner.epoch > 0 and file.is_file():
            records = json.loads(file.read_text())
            self.records = [r for r in records if r['epoch'] <= runner.epoch]
        if not self.records:
            self._look(runner, runner.epoch)

    def after_train_epoch(self, runner) -> None:
        """Look, where it is time."""
        if self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner):
            self._look(runner, runner.epoch + 1)

    @master_only
    def after_train(self, runner) -> None:
        """Draw the paths."""
        from mmstepnet.visualization.attention_figures import center_paths_figure
        from mmstepnet.visualization.figures import save_figure

        centers = [list(record['layers'].values()) for record in self.records]
        paths = [
            torch.tensor([layers[i]['centers'] for layers in centers])
            for i in range(len(centers[0]))
        ]
        save_figure(center_paths_figure(paths, self.reach), self.folder / 'paths')

    @master_only
    def _look(self, runner, epoch: int) -> None:
        from mmstepnet.visualization.attention_figures import head_figure
        from mmstepnet.visualization.figures import save_figure

        layers = self._layers(runner)
        self.records.append(
            dict(
                epoch=epoch,
                layers={
                    name: dict(centers=layer.centers.tolist(), spreads=layer.spreads.tolist())
                    for name, layer in layers.items()
                },
            )
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(json.dumps(self.records), self.folder / 'heads.json')
        save_figure(head_figure(list(layers.values()), self.reach), self.folder / f'epoch_{epoch}')
