"""One line in a config that measures stiffness at every validation and test."""

import hashlib
import itertools
from pathlib import Path

from mmengine.hooks import CheckpointHook, Hook, SyncBuffersHook
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop, Runner
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmstepnet.evaluation.metrics import StiffnessMetric
from mmstepnet.registry import HOOKS
from mmstepnet.stiffness import write_report

from .progress import steps_done, train_loop


@HOOKS.register_module()
class StiffnessHook(Hook):
    """Measures the stiffness of the model that is being validated or tested.

    Puts ``stiffness/tns``, ``stiffness/tns_std_error``, ``stiffness/nsi_mean``,
    ``stiffness/nsi_max`` and ``stiffness/proportion`` among the evaluation's metrics, so they are
    logged, plotted and usable in a checkpoint hook (``save_best='stiffness/tns', rule='greater'``).
    Writes ``WORK_DIR/stiffness/epoch_N.json`` (or ``iter_N``, ``val``, ``test``) with the samples
    beside it, and figures in the folder of the same name; figures also go to TensorBoard, under
    ``stiffness/``.

    Nothing is attached to the model outside of a batch's evaluation, and the numbers are those of
    the weights that are evaluated (with EMA, the averaged ones), on any number of processes.

    Args:
        interval: Measure at every so many validations; the last one of a training is always
            measured.
        figures: Whether to draw.
        **metric: Arguments of :class:`mmstepnet.evaluation.metrics.StiffnessMetric`: ``step``,
            ``blocks``, ``exclude_first``, ``nan_policy``, ``thresholds``. Where an evaluator holds
            that metric already, its own count.

    Raises:
        ValueError: ``interval`` below 1; before the run starts, a model without residual blocks,
            or an ``interval`` above 1 where ``save_best`` is one of these metrics.

    Example:
        >>> custom_hooks = [dict(type='mmstepnet.StiffnessHook')]
    """

    def __init__(self, interval: int = 1, figures: bool = True, **metric):
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f'interval must be an integer of at least 1, got {interval!r}')
        StiffnessMetric(**metric)  # unknown arguments are known before anything is trained
        self.interval = interval
        self.figures = figures
        self.metric_cfg = metric
        self._metrics: dict[str, StiffnessMetric] = {}
        self._loop: BaseLoop | None = None
        self._trained_seed: int | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._trained_seed = (checkpoint.get('meta') or {}).get('seed')

    def before_run(self, runner: Runner) -> None:
        if any(isinstance(hook, StiffnessHook) and hook is not self for hook in runner.hooks):
            raise ValueError(
                'custom_hooks holds two StiffnessHooks, but an evaluation is recorded once: '
                'measure another step or other blocks with tools/analysis_tools/stiffness.py'
            )
        # Before hours of training, unless the evaluators' own metrics know better what to record.
        evaluators = [runner.cfg.get(f'{split}_evaluator') for split in ('val', 'test')]
        if any(_count_metrics(evaluator) > 1 for evaluator in evaluators):
            raise ValueError(
                'an evaluator holds two StiffnessMetrics, but an evaluation is recorded once'
            )
        if not any(map(_count_metrics, evaluators)):
            StiffnessMetric(**self.metric_cfg).record(_unwrap(runner.model))

    def before_train(self, runner: Runner) -> None:
        prefix = self.metric_cfg.get('prefix') or StiffnessMetric.default_prefix
        if self.interval > 1 and (wanted := _save_best_keys(runner, prefix)):
            raise ValueError(
                f'interval must be 1 where save_best is {wanted[0]!r}: every validation needs that '
                f'value, got {self.interval}'
            )
        runner.model.train()  # norms that a backbone keeps in evaluation mode stay there
        synced = any(isinstance(hook, SyncBuffersHook) for hook in runner.hooks)
        if runner.world_size > 1 and not synced and any(map(_drifts, runner.model.modules())):
            runner.logger.warning(
                'Batch norm statistics differ between processes, and each validates its own '
                "samples with its own: add dict(type='SyncBuffersHook') to custom_hooks, or "
                'stiffness and all other metrics are not those of the saved checkpoint.'
            )

    def before_val_epoch(self, runner: Runner) -> None:
        self._begin(runner, runner.val_loop, 'val', measure=self._is_due(runner))

    def before_test_epoch(self, runner: Runner) -> None:
        self._begin(runner, runner.test_loop, 'test', measure=True)

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self._end():
            training = train_loop(runner)
            place = {} if training is None else dict([steps_done(training)])
            self._write(runner, 'val', metrics or {}, place)

    def after_test_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self._end():
            self._write(runner, 'test', metrics or {}, {})

    def report_path(self, runner: Runner, split: str, place: dict[str, int]) -> Path:
        """Where the report of an evaluation goes.

        Args:
            runner: The runner.
            split: ``'val'`` or ``'test'``.
            place: Where the training stands, ``{'epoch': 3}`` or ``{'iter': 500}``; empty outside
                of a training.
        """
        stem = '_'.join(map(str, *place.items())) if place else split
        return Path(runner.work_dir) / 'stiffness' / f'{stem}.json'

    def report_info(self, runner: Runner, split: str, place: dict[str, int]) -> dict:
        """What a report says about itself; arguments as in :meth:`report_path`."""
        loader = runner.val_dataloader if split == 'val' else runner.test_dataloader
        return dict(
            model=_model_name(runner),
            config=runner.cfg.filename,
            checkpoint=None if place else runner.cfg.get('load_from'),
            dataset=describe_dataset(loader.dataset),
            split=split,
            # An evaluation's own seed says nothing of the network.
            seed=runner.seed if place else self._trained_seed,
            **place,
        )

    def _is_due(self, runner: Runner) -> bool:
        training = train_loop(runner)
        if training is None:
            return True
        unit, done = steps_done(training)
        last = training.max_iters if unit == 'iter' else training.max_epochs
        return done >= last or (done // training.val_interval) % self.interval == 0

    def _begin(self, runner: Runner, loop: BaseLoop, split: str, measure: bool) -> None:
        self._end()
        evaluator = loop.evaluator
        own = [metric for metric in evaluator.metrics if isinstance(metric, StiffnessMetric)]
        if own:
            self._metrics[split] = own[0]
        elif split not in self._metrics:
            self._metrics[split] = StiffnessMetric(**self.metric_cfg)
        metric = self._metrics[split]
        metric.forget()
        if not measure:
            evaluator.metrics = [other for other in evaluator.metrics if other is not metric]
            return
        if not own:
            evaluator.metrics.append(metric)
        model = _unwrap(runner.model)
        run_iter = loop.run_iter

        def recorded(*args, **kwargs):
            # The evaluator sees a batch's predictions before any after_val_iter runs, and an error
            # in between would skip every hook: this is the span in which the model is recorded.
            with metric.record(model):
                return run_iter(*args, **kwargs)

        loop.run_iter = recorded
        self._loop = loop

    def _end(self) -> bool:
        """Give the loop its own method back; return whether it was taken."""
        loop, self._loop = self._loop, None
        if loop is None:
            return False
        del loop.run_iter
        return True

    def _write(self, runner: Runner, split: str, metrics: dict, place: dict[str, int]) -> None:
        if runner.rank != 0:
            return
        metric = self._metrics[split]
        measurement = metric.measurement
        own = f'{metric.prefix}/'
        report = measurement.report(
            metrics={key: value for key, value in metrics.items() if not key.startswith(own)},
            exclude_first=metric.recording['exclude_first'],
            **self.report_info(runner, split, place),
        )
        path = self.report_path(runner, split, place)
        write_report(path, report, nsi=measurement.nsi, dt=measurement.dt)
        if self.figures:
            self._draw(runner, report, measurement, path.with_suffix(''), place)
        tns = report['tns']
        error = '' if tns['std_error'] is None else f' +- {tns["std_error"]:.4f}'
        omitted = measurement.num_omitted
        runner.logger.info(
            f'TNS {tns["mean"]:.4f}{error} over {report["num_samples"]} samples'
            + (f' ({omitted} left out: no NSI)' if omitted else '')
            + f'; report: {path}'
        )

    def _draw(self, runner, report, measurement, folder: Path, place: dict[str, int]) -> None:
        from mmstepnet.visualization import figure_to_image, save_figure, stiffness_figures

        for name, figure in stiffness_figures(report, measurement.nsi, measurement.dt).items():
            save_figure(figure, folder / name)
            runner.visualizer.add_image(
                f'stiffness/{name}', figure_to_image(figure), step=next(iter(place.values()), 0)
            )


def describe_dataset(dataset) -> str:
    """Name a data set and the part of it that was seen, so that reports can be compared."""
    size = len(dataset)
    while hasattr(dataset, 'dataset'):
        dataset = dataset.dataset
    if hasattr(dataset, 'datasets'):
        return ' + '.join(map(describe_dataset, dataset.datasets))
    source = getattr(dataset, 'ann_file', '')
    if not source:
        folders = (getattr(dataset, 'data_prefix', None) or {}).values()
        source = ' '.join(str(folder) for folder in folders if folder)
    if not source:
        mode = 'test' if getattr(dataset, 'test_mode', False) else 'train'
        parts = getattr(dataset, 'data_root', ''), getattr(dataset, 'split', mode)
        source = ' '.join(filter(None, parts))
    chosen = getattr(dataset, '_indices', None)
    if chosen is not None:
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
        source += f' (indices {chosen if isinstance(chosen, int) else digest})'
    return f'{type(dataset).__name__} {source}, {size} samples'


def _save_best_keys(runner: Runner, prefix: str) -> list[str]:
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    wanted = [hook.save_best for hook in hooks if hook.save_best]
    keys = itertools.chain(*([key] if isinstance(key, str) else key for key in wanted))
    return [key for key in keys if key.startswith(f'{prefix}/')]


def _drifts(module: nn.Module) -> bool:
    """Whether training gives a module's running statistics other values on every process."""
    synced = isinstance(module, nn.SyncBatchNorm) or getattr(module, 'sync', False)
    return isinstance(module, _BatchNorm) and module.training and not synced


def _model_name(runner: Runner) -> str:
    if runner.cfg.filename:
        return Path(runner.cfg.filename).stem
    model = _unwrap(runner.model)
    return type(getattr(model, 'backbone', model)).__name__


def _count_metrics(evaluator) -> int:
    metrics = evaluator if isinstance(evaluator, list | tuple) else [evaluator]
    kinds = [metric.get('type') for metric in metrics if isinstance(metric, dict)]
    return sum(str(kind).rpartition('.')[2].startswith('StiffnessMetric') for kind in kinds)


def _unwrap(model):
    return model.module if is_model_wrapper(model) else model
