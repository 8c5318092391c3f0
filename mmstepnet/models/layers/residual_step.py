"""The one place where a residual network takes its step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .fused_step import can_absorb, fused_step, has_hooks, is_transformed


@contextmanager
def plain_steps() -> Iterator[None]:
    """Within this context every :class:`ResidualStep` runs as single operations.

    Same values and gradients up to rounding. Needed for second derivatives, for gradient penalties
    for instance; forward-mode AD, ``torch.func`` and compilers find their way without it.
    """
    before, ResidualStep.fuse = ResidualStep.fuse, False
    try:
        yield
    finally:
        ResidualStep.fuse = before


class ResidualStep(nn.Module):
    r"""One step of the solver: :math:`x_{t+1} = \phi(x_t + f(x_t) \cdot dt)`.

    Every residual block of the package ends in one. A recorder listens here and nowhere else.

    Args:
        step_size: Module ``(identity, residual) -> dt``, ``dt`` broadcastable to ``residual``; None
            is dt = 1.
        activation: Module applied to the sum, the block's ReLU for instance; None for none.

    Shape:
        - identity: (N, C, H, W), what the shortcut delivers, the state x_t
        - residual: (N, C, H, W), the residual branch f(x_t); with ``norm`` what that norm turns
          into f(x_t)
        - memory: for a recurrent step size, what the block before returned; None for the first
        - norm: the residual branch's last norm, if it is still to be applied. Handing it over saves
          time and memory: in training a batch norm becomes a part of the step where dt depends on
          spatial means alone, and elsewhere the sum overwrites f where nothing else needs it.
        - returns: (N, C, H, W); with a recurrent step size a tuple of that and the next memory

    Attributes:
        recorder: None, or a callable ``recorder(step, identity, residual, dt)`` that is called in
            each forward pass before the sum; ``dt`` is None where there is no step size. It must
            not keep or change the tensors.
        fuse: Whether norm, step size, sum and ReLU run as one autograd function where gradients are
            wanted and they allow it. None, the default, is on CPUs alone, where that was measured
            to be faster. Set it on the class for all; :func:`plain_steps` sets it to False.
    """

    fuse: bool | None = None

    def __init__(self, step_size: nn.Module | None = None, activation: nn.Module | None = None):
        super().__init__()
        self.step_size = step_size
        self.activation = activation
        self.recorder: Callable | None = None

    def __getstate__(self) -> dict:
        # Whoever records this step did not ask for its copies (EMA, pickles), nor could ever leave.
        return {**self.__dict__, 'recorder': None}

    @property
    def recurrent(self) -> bool:
        """Whether ``forward`` takes and returns a memory, as the step size does."""
        return getattr(self.step_size, 'recurrent', False)

    def forward(
        self,
        identity: Tensor,
        residual: Tensor,
        memory: Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        transformed = is_transformed(identity) or is_transformed(residual)
        fuse = residual.device.type == 'cpu' if self.fuse is None else self.fuse
        fuse = fuse and not transformed and self._can_fuse(identity, residual)
        graph = torch.is_grad_enabled()
        if fuse and graph and can_absorb(norm, residual):
            return self._fused(identity, residual, norm)
        # Nobody else holds what a norm has just returned, unless a hook took it.
        overwrite = (
            not transformed
            and isinstance(norm, _BatchNorm | nn.Identity)
            and not any(has_hooks(m) for m in (self, norm, self.step_size) if m is not None)
        )
        if norm is not None:
            residual = norm(residual)
        if fuse and graph:
            return self._fused(identity, residual, None)

        dt = None
        if self.recurrent:
            dt, memory = self.step_size(identity, residual, memory)
        elif self.step_size is not None:
            dt = self.step_size(identity, residual)
        if self.recorder is not None:
            self.recorder(self, identity, residual, dt)
        overwrite = overwrite and identity.dtype == residual.dtype
        if dt is None:
            out = residual.add_(identity) if overwrite else identity + residual
        else:
            # With a graph f is kept for the gradient of dt.
            overwrite = overwrite and not graph
            out = torch.addcmul(identity, residual, dt, out=residual if overwrite else None)
        out = out if self.activation is None else self.activation(out)
        return (out, memory) if self.recurrent else out

    def _can_fuse(self, identity: Tensor, residual: Tensor) -> bool:
        step_size, activation = self.step_size, self.activation
        return (
            getattr(step_size, 'computed_by_means', False)
            # Fully sharded parameters can be plain tensors during the forward pass.
            and next(step_size.parameters(), None) is not None
            and residual.numel() > 0
            and identity.shape == residual.shape
            and identity.dtype == residual.dtype
            and not has_hooks(step_size)
            and (activation is None or (type(activation) is nn.ReLU and not has_hooks(activation)))
        )

    def _fused(self, identity: Tensor, residual: Tensor, norm: nn.Module | None) -> Tensor:
        record = None if self.recorder is None else partial(self.recorder, self)
        relu = self.activation is not None
        return fused_step(identity, residual, norm, self.step_size, relu, record)
