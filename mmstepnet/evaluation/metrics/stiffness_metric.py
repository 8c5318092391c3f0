"""Stiffness of the evaluated network's feature trajectory, as a metric of an evaluation."""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mmengine.dist import all_gather_object
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from torch import Tensor, nn

from mmstepnet.registry import METRICS
from mmstepnet.stiffness import (
    TNS,
    TrajectoryRecorder,
    build_report,
    stiffness_proportion,
    total_neural_stiffness,
)
from mmstepnet.stiffness.checks import check_nan_policy
from mmstepnet.stiffness.indices import divide_norms
from mmstepnet.stiffness.recorder import STEPS


class Measurement(NamedTuple):
    """What one evaluation measured, on every process the same.

    Attributes:
        nsi: (N, L) float64, samples in the data set's order, those without NSI left out.
        dt: (N, L) float64, mean step sizes, or None for a network without attention.
        stages: (L,) int64.
        names: L names of blocks.
        step: Which NSI it is, ``'attention'`` or ``'unit'``.
        num_omitted: Samples that ``nan_policy='omit'`` left out.
        tns: The total neural stiffness.
    """

    nsi: Tensor
    dt: Tensor | None
    stages: Tensor
    names: list[str]
    step: str
    num_omitted: int
    tns: TNS

    def report(self, **info) -> dict:
        """Condense to a report; ``info`` as in :func:`mmstepnet.stiffness.build_report`."""
        return build_report(
            self.nsi,
            self.stages,
            self.names,
            self.step,
            dt=self.dt,
            num_omitted=self.num_omitted,
            **info,
        )


@METRICS.register_module()
class StiffnessMetric(BaseMetric):
    """TNS and what belongs to it, measured while the other metrics' predictions are made.

    A metric never sees the model, so somebody has to show it: in a config
    :class:`mmstepnet.engine.hooks.StiffnessHook`, which also adds this metric where an evaluator
    has none, and in a loop of one's own :meth:`record`.

    Its values are ``stiffness/tns``, ``stiffness/tns_std_error``, ``stiffness/nsi_mean`` and
    ``stiffness/nsi_max`` (over samples and blocks), and ``stiffness/proportion``, p-hat at
    ``thresholds``. They do not depend on the number of processes: one row per sample is collected,
    in the sampler's order, and what the sampler repeated to fill the last batch is cut off.

    Args:
        step: See :class:`mmstepnet.stiffness.TrajectoryRecorder`.
        blocks: See there.
        exclude_first: See there.
        nan_policy: ``'raise'`` ends the evaluation at a sample without NSI and names it;
            ``'omit'`` leaves it out and counts it.
        thresholds: (M1, M2) of ``stiffness/proportion``: by default the share of blocks that are
            stiffer than their stage's mean by a tenth or more.
        prefix: Prefix of the values' names.

    Raises:
        ValueError: Unknown ``step`` or ``nan_policy``, thresholds that are negative or not finite.

    Attributes:
        measurement: The last evaluation's :class:`Measurement`.

    Example:
        >>> metric = StiffnessMetric()
        >>> for images in loader:
        ...     with metric.record(model):
        ...         metric.process(images, model(images))
        >>> metric.evaluate(size=len(loader.dataset))['stiffness/tns']
    """

    default_prefix = 'stiffness'

    def __init__(
        self,
        step: str = 'attention',
        blocks: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        exclude_first: bool = True,
        nan_policy: str = 'raise',
        thresholds: tuple[float, float] = (0.1, 0.0),
        prefix: str | None = None,
    ):
        super().__init__(prefix=prefix)
        if len(thresholds) != 2 or not all(0 <= value < math.inf for value in thresholds):
            raise ValueError(
                f'thresholds must be M1 and M2, finite and not negative, got {thresholds}'
            )
        if step not in STEPS:
            raise ValueError(f'step must be one of {STEPS}, got {step!r}')
        check_nan_policy(nan_policy)
        self.recording = dict(step=step, blocks=blocks, exclude_first=exclude_first)
        self.nan_policy = nan_policy
        self.thresholds = thresholds
        self.measurement: Measurement | None = None
        self._recorder: TrajectoryRecorder | None = None

    def record(self, model: nn.Module) -> TrajectoryRecorder:
        """Return the context in which the model's forward passes are recorded.

        It can be entered any number of times before :meth:`evaluate`, always for the same model,
        and is best entered for one batch at a time: what it attaches to the model is then gone
        whatever happens outside.

        Raises:
            ValueError: The model has no residual blocks, or not those that were named.
        """
        if self._recorder is None:
            # Whether to raise is decided after samples of all processes have come together: an
            # error on one of them would leave the others waiting, and its number means nothing.
            self._recorder = TrajectoryRecorder(model, **self.recording, nan_policy='omit')
            if len(self._recorder.stages.unique()) == len(self._recorder.stages):
                print_log(
                    'Every stage has a single recorded block, which is its own mean: TNS is 0 '
                    'whatever the features are. exclude_first=False records the first blocks too.',
                    logger='current',
                    level=logging.WARNING,
                )
        return self._recorder

    def process(self, data_batch, data_samples: Sequence) -> None:
        """Take over what was recorded for one batch.

        Raises:
            RuntimeError: Nobody recorded, or not one forward pass per sample.
        """
        if self._recorder is None:
            raise RuntimeError(
                'StiffnessMetric was not shown the model: add '
                "dict(type='mmstepnet.StiffnessHook') to custom_hooks, or wrap the forward passes "
                'in StiffnessMetric.record(model)'
            )
        rows = self._recorder.take()
        if len(rows) != len(data_samples):
            raise RuntimeError(
                f'{len(rows)} samples passed through the recorded blocks for a batch of '
                f'{len(data_samples)}: stiffness needs one forward pass per sample, without '
                'test-time augmentation'
            )
        self.results.append(rows)

    def evaluate(self, size: int) -> dict:
        """Collect all processes' samples and compute.

        Args:
            size: Length of the data set; samples beyond are repetitions and are cut off.

        Returns:
            The values by name, on every process.

        Raises:
            ValueError: Nothing was recorded, or a sample has no NSI and ``nan_policy='raise'``.
        """
        try:
            metrics = self.compute_metrics(self._collect(size))
        finally:
            self.forget()
        return {'/'.join((self.prefix, key)): value for key, value in metrics.items()}

    def forget(self) -> None:
        """Drop the samples of an evaluation, for instance of one that was interrupted."""
        self.results.clear()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.take()

    def compute_metrics(self, results: tuple[Tensor, list[str], Tensor]) -> dict[str, float]:
        """Compute from one row a sample, (N, 3, L): norms of state and increment, step size; with
        the blocks' names and stages, which a process without samples has from the others."""
        rows, names, stages = results
        state, increment, dt = rows.unbind(dim=1)
        nsi = divide_norms(increment, state, names, nan_policy=self.nan_policy)
        keep = nsi.isfinite().all(dim=1)
        if not keep.any():
            raise ValueError(f'none of the {len(nsi)} samples has an NSI in every block')
        nsi, dt = nsi[keep], dt[keep]
        self.measurement = Measurement(
            nsi=nsi,
            dt=None if (dt == 1).all() else dt,
            stages=stages,
            names=names,
            step=self.recording['step'],
            num_omitted=int((~keep).sum()),
            tns=total_neural_stiffness(nsi, stages),
        )
        m1, m2 = ([threshold] for threshold in self.thresholds)
        return {
            'tns': self.measurement.tns.mean.item(),
            'tns_std_error': self.measurement.tns.std_error.item(),
            'nsi_mean': nsi.mean().item(),
            'nsi_max': nsi.max().item(),
            'proportion': stiffness_proportion(nsi, stages, m1, m2).item(),
        }

    def _collect(self, size: int) -> tuple[Tensor, list[str], Tensor]:
        mine = None
        if self.results:
            mine = torch.cat(self.results), self._recorder.names, self._recorder.stages
        parts = all_gather_object(mine)
        # Samplers deal samples out like cards: the i-th of rank r is the (i * world + r)-th of all.
        order = torch.cat(
            [
                torch.arange(0 if part is None else len(part[0])) * len(parts) + rank
                for rank, part in enumerate(parts)
            ]
        ).argsort()
        parts = [part for part in parts if part is not None]
        if not parts:
            raise ValueError('nothing was recorded: the evaluation saw no sample')
        _, names, stages = parts[0]
        return torch.cat([rows for rows, _, _ in parts])[order][:size], names, stages
