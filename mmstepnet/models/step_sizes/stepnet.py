"""StepNet's adaptor: the step size from two neighbouring states of the trajectory.

Huang, Liang, Qin, Zhong, Lin: Understanding Self-attention Mechanism via Dynamical System
Perspective, ICCV 2023, https://arxiv.org/abs/2308.09939, section 5.
"""

import torch
from torch import Tensor, nn

from .base import StepSize
from .pooled_norm import PooledBatchNorm

INPUTS = ('pair', 'current', 'next', 'difference')


def check_inputs(inputs: str) -> str:
    """Return ``inputs`` if it is one of ``INPUTS``, raise ``ValueError`` otherwise."""
    if inputs not in INPUTS:
        raise ValueError(f'inputs must be one of {", ".join(INPUTS)}, got {inputs!r}')
    return inputs


def means_of_inputs(inputs: str) -> tuple[bool, bool]:
    """Of (identity, residual), which one's mean an adaptor with ``inputs`` needs."""
    return inputs != 'difference', inputs != 'current'


def state_means(
    identity_mean: Tensor | None, residual_mean: Tensor | None, inputs: str
) -> tuple[Tensor, ...]:
    """The states' spatial means that an adaptor with ``inputs`` sees, one (N, C) or two."""
    if inputs == 'current':
        return (identity_mean,)
    if inputs == 'difference':
        return (residual_mean,)
    coarse_next = identity_mean + residual_mean
    return (coarse_next,) if inputs == 'next' else (identity_mean, coarse_next)


class StepNetAdaptor(StepSize):
    r"""Step size :math:`dt = \sigma(\mathrm{IE}(\mathrm{BN}(w_0\,\bar x_t + w_1\,\bar x_{t+1})))`
    (equation 12).

    :math:`\bar x_t` is the spatial mean of the state and :math:`\bar x_{t+1}` that of the coarse
    next state ``x_t + f``. Every channel mixes its own two means only (a 1x1 convolution with one
    group a channel, no bias); IE is ``scale * u + shift`` per channel, 0 and -1 at the start, so
    that every step begins at ``sigmoid(-1) = 0.269``. 6 parameters a channel with
    ``inputs='pair'``.

    The mean is linear, ``mean(x + f) = mean(x) + mean(f)``: the coarse state is never materialised.

    With one sample in training batch statistics don't exist; the running ones are used and left as
    they are.

    Args:
        in_channels: Channels C of the state.
        inputs: What the adaptor sees: ``'pair'`` (x_t and x_{t+1}, the paper's), ``'current'``
            (x_t), ``'next'`` (x_{t+1}) or ``'difference'`` (x_{t+1} - x_t, that is f): the rows of
            table 4.
        sync: In distributed training take the batch norm's statistics over all ranks.
        eps: Added to the variance of the batch norm.
        momentum: Of the running statistics of the batch norm.

    Shape:
        - identity ``x_t`` and residual ``f``: (N, C, H, W)
        - returns: ``dt`` in (0, 1), (N, C, 1, 1), of the residual's dtype.

    Raises:
        ValueError: Unknown ``inputs``, or ``in_channels`` below 1.
        TypeError: Called with one tensor, as a plugin layer is: it needs the shortcut's state too.

    Example:
        >>> import torch
        >>> from mmstepnet.models.step_sizes import StepNetAdaptor
        >>> adaptor = StepNetAdaptor(64)
        >>> x, f = torch.randn(2, 2, 64, 8, 8)
        >>> adaptor(x, f).shape
        torch.Size([2, 64, 1, 1])
    """

    def __init__(
        self,
        in_channels: int,
        inputs: str = 'pair',
        sync: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ):
        super().__init__(in_channels)
        self.inputs = check_inputs(inputs)
        self.weight = nn.Parameter(torch.empty(in_channels, 2 if inputs == 'pair' else 1))
        self.norm = PooledBatchNorm(in_channels, sync=sync, eps=eps, momentum=momentum)
        self.scale = nn.Parameter(torch.empty(in_channels))
        self.shift = nn.Parameter(torch.empty(in_channels))
        self.deployed = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Uniform in +-1/sqrt(fan_in), torch's own choice for a convolution.
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        self.norm.reset_parameters()
        nn.init.zeros_(self.scale)
        nn.init.constant_(self.shift, -1.0)

    def forward(self, identity: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            raise TypeError(
                'StepNetAdaptor needs state and residual, but a plugin layer gets one tensor: '
                "use mmstepnet.StepResNet with position='residual_step'"
            )
        return super().forward(identity, residual)

    @property
    def means(self) -> tuple[bool, bool]:
        return means_of_inputs(self.inputs)

    def gate_of_means(self, identity_mean: Tensor | None, residual_mean: Tensor | None) -> Tensor:
        of_identity, of_residual = self._coefficients()
        terms = []
        for mean, weight in ((identity_mean, of_identity), (residual_mean, of_residual)):
            if weight is not None:
                # Means are float32 at least; a module turned to half precision as a whole is not.
                terms.append((mean.to(weight.dtype), weight))
        if self.deployed:
            logit = self.bias
        else:
            (mean, weight), *terms = terms
            logit = mean * weight
        for mean, weight in terms:
            logit = torch.addcmul(logit, mean, weight)
        if not self.deployed:
            logit = torch.addcmul(self.shift, self.norm(logit), self.scale)
        return logit.sigmoid()

    def _coefficients(self) -> tuple[Tensor | None, Tensor | None]:
        """What the means of state and residual are multiplied with, each (C,).

        The mean of ``x + f`` is the sum of both: few operations on small tensors.
        """
        current, *following = self.weight.unbind(1)
        if self.inputs == 'pair':
            return current + following[0], following[0]
        of_identity, of_residual = self.means
        return current if of_identity else None, current if of_residual else None

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """Fold convolution, BN and IE to ``sigmoid(a * mean(x) + b * mean(x + f) + c)``, in place.

        A second call changes nothing.

        Raises:
            RuntimeError: In training mode, where the batch statistics are not fixed yet.
        """
        if self.deployed:
            return
        if self.training or self.norm.training:
            raise RuntimeError('switch_to_deploy() needs evaluation mode: call eval() first')
        norm = self.norm
        gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        weight = (self.scale * gain)[:, None] * self.weight
        bias = self.scale * (norm.bias - norm.running_mean * gain) + self.shift
        del self.weight, self.norm, self.scale, self.shift
        self.register_buffer('weight', weight)
        self.register_buffer('bias', bias)
        self.deployed = True

    def extra_repr(self) -> str:
        return f'{self.in_channels}, inputs={self.inputs!r}, deployed={self.deployed}'
