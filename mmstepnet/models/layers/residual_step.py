"""The one place where a residual network takes its step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class ResidualStep(nn.Module):
    r"""One step of the solver: :math:`x_{t+1} = \phi(x_t + f(x_t) \cdot dt)`.

    Every residual block of the package ends in one. A recorder listens here and nowhere else.

    Args:
        step_size: Module ``(identity, residual) -> dt``, ``dt`` broadcastable to ``residual``; None
            is dt = 1.
        activation: Module applied to the sum, the block's ReLU for instance; None for none.

    Shape:
        - identity: (N, C, H, W), what the shortcut delivers, the state x_t
        - residual: (N, C, H, W), the residual branch f(x_t)
        - memory: for a recurrent step size, what the block before returned; None for the first
        - returns: (N, C, H, W); with a recurrent step size a tuple of that and the next memory

    Attributes:
        recorder: None, or a callable ``recorder(step, identity, residual, dt)`` that is called in
            each forward pass before the sum; ``dt`` is None where there is no step size. It must
            not keep or change the tensors.
    """

    def __init__(self, step_size: nn.Module | None = None, activation: nn.Module | None = None):
        super().__init__()
        self.step_size = step_size
        self.activation = activation
        self.recorder: Callable | None = None

    @property
    def recurrent(self) -> bool:
        """Whether ``forward`` takes and returns a memory, as the step size does."""
        return getattr(self.step_size, 'recurrent', False)

    def forward(
        self, identity: Tensor, residual: Tensor, memory: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        dt = None
        if self.recurrent:
            dt, memory = self.step_size(identity, residual, memory)
        elif self.step_size is not None:
            dt = self.step_size(identity, residual)
        if self.recorder is not None:
            self.recorder(self, identity, residual, dt)
        out = identity + residual if dt is None else torch.addcmul(identity, residual, dt)
        out = out if self.activation is None else self.activation(out)
        return (out, memory) if self.recurrent else out
