"""StepNet's adaptor with one part changed, for ablations.

The paper (https://arxiv.org/abs/2308.09939, table 4) compares four such adaptors, which it shows in
a figure only. These four are this package's own reading, not the paper's definition.
"""

import torch
from torch import Tensor, nn

from .base import StepSize
from .pooled_norm import PooledBatchNorm
from .squeeze_excitation import channel_mlp
from .stepnet import check_inputs, means_of_inputs, state_means

VARIANTS = ('a', 'b', 'c', 'd')


class StepNetAblation(StepSize):
    r"""Step size as of :class:`StepNetAdaptor`,
    :math:`\sigma(\mathrm{IE}(\mathrm{BN}(\mathrm{mix})))`, with one part changed.

    ======= ==================================================================================
    variant what is different
    ======= ==================================================================================
    a       channels mix: two full 1x1 convolutions that meet in ``C // reduction`` channels
    b       no IE: ``sigmoid(BN(mix))``
    c       no BN: ``sigmoid(IE(mix))``
    d       all channels share one pair of mixing weights
    ======= ==================================================================================

    Args:
        in_channels: Channels C of the state.
        variant: ``'a'``, ``'b'``, ``'c'`` or ``'d'``.
        inputs: What the adaptor sees, as of :class:`StepNetAdaptor`.
        reduction: Of variant a.
        sync: In distributed training take the batch norm's statistics over all ranks.

    Shape:
        - identity ``x_t`` and residual ``f``: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1), of the residual's dtype

    Raises:
        ValueError: Unknown ``variant`` or ``inputs``, a ``reduction`` that leaves no channel.
        TypeError: Called with one tensor, as a plugin layer is.
    """

    def __init__(
        self,
        in_channels: int,
        variant: str,
        inputs: str = 'pair',
        reduction: int = 16,
        sync: bool = True,
    ):
        super().__init__(in_channels)
        if variant not in VARIANTS:
            raise ValueError(f'variant must be one of {", ".join(VARIANTS)}, got {variant!r}')
        self.variant = variant
        self.inputs = check_inputs(inputs)
        num_inputs = 2 if inputs == 'pair' else 1
        if variant == 'a':
            self.mlp = channel_mlp(
                in_channels, reduction, bias=False, inputs_per_channel=num_inputs
            )
        else:
            self.weight = nn.Parameter(
                torch.empty(1 if variant == 'd' else in_channels, num_inputs)
            )
        if variant != 'c':
            self.norm = PooledBatchNorm(in_channels, sync=sync)
        if variant != 'b':
            self.scale = nn.Parameter(torch.empty(in_channels))
            self.shift = nn.Parameter(torch.empty(in_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.variant != 'a':
            bound = self.weight.shape[1] ** -0.5
            nn.init.uniform_(self.weight, -bound, bound)
        if self.variant != 'b':
            nn.init.zeros_(self.scale)
            nn.init.constant_(self.shift, -1.0)

    def forward(self, identity: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            raise TypeError(
                'StepNetAblation needs state and residual, but a plugin layer gets one tensor: '
                "use mmstepnet.StepResNet with position='residual_step'"
            )
        return super().forward(identity, residual)

    @property
    def means(self) -> tuple[bool, bool]:
        return means_of_inputs(self.inputs)

    def gate_of_means(self, identity_mean: Tensor | None, residual_mean: Tensor | None) -> Tensor:
        pooled = state_means(identity_mean, residual_mean, self.inputs)
        if self.variant == 'a':
            logit = self.mlp(torch.cat(pooled, 1).to(self.mlp[0].weight.dtype))
        else:
            logit = sum(mean * self.weight[:, i] for i, mean in enumerate(pooled))
            logit = logit.to(self.weight.dtype)
        if self.variant != 'c':
            logit = self.norm(logit)
        if self.variant != 'b':
            logit = torch.addcmul(self.shift, logit.to(self.shift.dtype), self.scale)
        return logit.sigmoid()

    def extra_repr(self) -> str:
        return f'{self.in_channels}, variant={self.variant!r}, inputs={self.inputs!r}'
