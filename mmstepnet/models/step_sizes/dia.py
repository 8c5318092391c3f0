"""Dense-and-implicit attention: one recurrent cell along the blocks of a stage.

Huang, Liang, Liang, Yang: DIANet: Dense-and-Implicit Attention Network, AAAI 2020,
https://arxiv.org/abs/1905.10671.
"""

import torch
from torch import Tensor, nn

from .base import StepSize, spatial_mean
from .squeeze_excitation import channel_mlp


class DIACell(nn.Module):
    r"""LSTM cell with bottleneck layers, and a sigmoid in place of the output's tanh.

    :math:`(i, f, g, o) = \mathrm{MLP}_x(x) + \mathrm{MLP}_h(h)`, :math:`c' = \sigma(f) c +
    \sigma(i) \tanh(g)`, :math:`h' = \sigma(o)\,\sigma(c')`.

    Args:
        in_channels: C, of the input as of both states.
        reduction: r, each MLP meets in ``C // r`` channels.

    Shape:
        - x: (N, C)
        - memory: (2, N, C), the states h and c
        - returns: the next memory, (2, N, C)
    """

    def __init__(self, in_channels: int, reduction: int):
        super().__init__()
        self.input = channel_mlp(in_channels, reduction, bias=True, outputs_per_channel=4)
        self.hidden = channel_mlp(in_channels, reduction, bias=True, outputs_per_channel=4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        hidden, cell = memory
        gates = self.input(x) + self.hidden(hidden.to(x.dtype))
        # The cell state sums over blocks: at least float32, under autocast too.
        i, f, g, o = gates.to(cell.dtype).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return torch.stack((o.sigmoid() * cell.sigmoid(), cell))


class DIA(StepSize):
    r"""Step size :math:`dt = h_t`, the output of an LSTM cell that reads :math:`\bar f` block by
    block.

    The blocks of one stage share one cell and hand its memory on. The memory is a plain tensor that
    enters a block and leaves it again: nothing is kept between two forward passes, each starts from
    zeros.

    The cell belongs to the first block of the stage that has one; the others refer to it
    (:meth:`share`), so that parameters, checkpoints and optimizers hold it once.

    Args:
        in_channels: Channels C of the residual.
        reduction: r, the cell's layers meet in ``C // r`` channels.

    Shape:
        - identity (ignored) and residual: (N, C, H, W)
        - memory: (2, N, C), what the block before returned, or None for zeros
        - returns: ``dt`` in (0, 1), (N, C, 1, 1), and the next memory

    Raises:
        ValueError: ``reduction`` leaves no channel.
        TypeError: Called with one tensor, as a plugin layer is: it needs the memory of the block
            before.
    """

    recurrent = True

    def __init__(self, in_channels: int, reduction: int = 4):
        super().__init__(in_channels)
        self.reduction = reduction
        self.cell = DIACell(in_channels, reduction)

    def forward(
        self, identity: Tensor, residual: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            raise TypeError(
                'DIA needs the memory of the block before, but a plugin layer gets one tensor: '
                "use mmstepnet.StepResNet or StepResNetCifar with position='residual_step'"
            )
        pooled = spatial_mean(residual)
        if memory is None:
            memory = pooled.new_zeros(2, *pooled.shape)
        memory = self.cell(pooled.to(residual.dtype), memory)
        return memory[0].to(residual.dtype)[:, :, None, None], memory

    def share(self, owner: 'DIA') -> None:
        """Use the cell of ``owner`` from now on, as a reference that is not registered here.

        Raises:
            ValueError: The two differ in channels or reduction.
        """
        mine, theirs = (self.in_channels, self.reduction), (owner.in_channels, owner.reduction)
        if mine != theirs:
            raise ValueError(
                'the DIA blocks of one stage share a cell, so their (in_channels, reduction) '
                f'must be equal, got {theirs} and {mine}'
            )
        del self.cell
        # Past nn.Module's registration. copy.deepcopy keeps the reference within the copied
        # network.
        object.__setattr__(self, 'cell', owner.cell)

    def extra_repr(self) -> str:
        return f'{self.in_channels}, reduction={self.reduction}'
