"""Recording the stiffness of a network's own feature trajectory while it runs."""

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .blocks import find_blocks
from .checks import check_nan_policy
from .indices import divide_norms

STEPS = ('attention', 'unit')


class TrajectoryRecorder:
    r"""Records NSI and step size of every residual block, sample by sample.

    A block maps the state x to x + f(x) dt (:mod:`mmstepnet.stiffness.blocks` says what x and f are
    in which network). Only norms are kept, in float64: no graph, no feature map, nothing on the
    device. They leave it in one copy a batch.

    Args:
        model: Any residual network. Blocks of this package and the ResNets of torchvision, timm,
            MMDetection and MMPretrain, their ConvNeXt, Swin and ViT are found by themselves.
        blocks: Which modules are the blocks, where they are not found or not all wanted: a pattern
            of module names (``'layer*.*'``; ``*`` does not cross a dot), a compiled regular
            expression that matches whole names, a list of names, or a list of lists of names, one
            a stage. In the other forms, blocks whose names agree up to their last index are one
            stage.
        step: ``'attention'`` for :math:`\|f\| / \|x\|` (definition 3 of the paper), ``'unit'`` for
            :math:`\|f\,dt\| / \|x\|`, what the network really moves. They differ only where there
            is attention.
        exclude_first: Leave out the first (of the chosen) blocks of every stage, as the paper does.
        nan_policy: ``'raise'``, or ``'omit'`` to get NaN where a state has norm zero or features
            are NaN or Inf. Functions with ``nan_policy='omit'`` leave those samples out.

    Raises:
        TypeError: ``blocks`` of another type.
        ValueError: unknown ``step`` or ``nan_policy``, no residual blocks (candidates are listed).
            In a forward pass with ``nan_policy='raise'``, a state of norm zero, NaN or Inf, named
            by block and sample.

    Example:
        >>> model = torchvision.models.resnet18(weights='DEFAULT').eval()
        >>> with torch.no_grad(), TrajectoryRecorder(model) as record:
        ...     for images, _ in loader:
        ...         model(images)
        >>> total_neural_stiffness(record.nsi, record.stages)
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str | re.Pattern | Sequence[str] | Sequence[Sequence[str]] | None = None,
        step: str = 'attention',
        exclude_first: bool = True,
        nan_policy: str = 'raise',
    ):
        if step not in STEPS:
            raise ValueError(f"step must be 'attention' or 'unit', got {step!r}")
        check_nan_policy(nan_policy)
        self.step = step
        self.nan_policy = nan_policy
        self._blocks = find_blocks(model, blocks, step == 'unit', exclude_first)
        self._handles: list = []
        self._rows: list[Tensor] = []
        self._pending: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __enter__(self) -> 'TrajectoryRecorder':
        if self._handles:
            raise RuntimeError('this recorder is already listening')
        try:
            for index, block in enumerate(self._blocks):
                self._handles += block.listener.attach(partial(self._receive, index))
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        self._detach()
        missing = self._missing()
        self._pending.clear()
        if exc_type is None and missing:
            raise RuntimeError(f'the last forward pass did not reach {missing}')

    def __len__(self) -> int:
        """Number of samples recorded."""
        return sum(map(len, self._rows))

    @property
    def names(self) -> list[str]:
        """Names of the L recorded blocks."""
        return [block.name for block in self._blocks]

    @property
    def stages(self) -> Tensor:
        """(L,) int64, the stage of each block, counted from 0."""
        return torch.tensor([block.stage for block in self._blocks])

    @property
    def nsi(self) -> Tensor:
        """(N, L) float64, on the CPU, samples in the order in which they were seen."""
        rows = self._all()
        return divide_norms(rows[:, 1], rows[:, 0], self.names, nan_policy=self.nan_policy)

    @property
    def dt(self) -> Tensor:
        """(N, L) float64, on the CPU: mean step size over C, H, W; 1 without attention."""
        return self._all()[:, 2]

    def take(self) -> Tensor:
        """Hand over what was recorded and forget it.

        Returns:
            (N, 3, L) float64: norm of the state, norm of the increment, mean step size.
        """
        rows = torch.cat(self._rows) if self._rows else torch.empty(0, 3, len(self._blocks))
        self._rows.clear()
        return rows.double()

    def _all(self) -> Tensor:
        if not self._rows:
            raise ValueError(
                'nothing was recorded: no forward pass ran inside the with block. (A pass compiled '
                'before it may skip hooks: run the network that torch.compile was given)'
            )
        if len(self._rows) > 1:
            self._rows = [torch.cat(self._rows)]
        return self._rows[0]

    def _missing(self) -> str:
        if not self._pending:
            return ''
        return ', '.join(b.name for i, b in enumerate(self._blocks) if i not in self._pending)

    def _receive(self, index: int, state_norm: Tensor, increment_norm: Tensor, dt: Tensor) -> None:
        if index in self._pending:
            name = self._blocks[index].name
            missing = self._missing()
            self._pending.clear()
            raise RuntimeError(
                f'block {name} ran a second time before {missing} ran once: a recorded block must '
                'run exactly once in each forward pass; leave the others out of blocks. After a '
                'pass that an error broke off, the with block has to be entered anew'
            )
        # A step that isn't finite spoils the next state, but after the last block nobody looks.
        increment_norm = increment_norm.where(dt.isfinite(), torch.nan)
        self._pending[index] = state_norm, increment_norm, dt
        if len(self._pending) < len(self._blocks):
            return
        columns = [torch.stack(self._pending[i]) for i in range(len(self._blocks))]
        self._pending.clear()
        rows = torch.stack(columns, dim=-1).transpose(0, 1).cpu()
        if self.nan_policy == 'raise':
            divide_norms(rows[:, 1], rows[:, 0], self.names, first_sample=len(self))
        self._rows.append(rows)

    def _detach(self) -> None:
        while self._handles:
            self._handles.pop()()
