"""What every step size has in common: one interface, and the use as a plain plugin layer."""

import torch
from torch import Tensor, nn


def check_channels(in_channels: int) -> int:
    """Return ``in_channels`` if it is a positive int, raise ``ValueError`` otherwise."""
    if isinstance(in_channels, bool) or not isinstance(in_channels, int) or in_channels < 1:
        raise ValueError(f'in_channels must be a positive int, got {in_channels!r}')
    return in_channels


def spatial_mean(x: Tensor) -> Tensor:
    """Global average pooling, (N, C, H, W) -> (N, C), summed in at least float32.

    A half-precision sum over a large map loses the digits that a gate lives on.
    """
    return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


class StepSize(nn.Module):
    """Base of the attention modules that act as the step size ``dt`` of ``x + f * dt``.

    A subclass implements :meth:`gate`, or :meth:`gate_of_means` where spatial means are all that it
    sees: then a training step is cheaper (:mod:`mmstepnet.models.layers.fused_step`). Called with
    ``(identity, residual)`` it returns ``dt``; called with one tensor, as MMDetection calls a
    plugin layer, it returns that tensor scaled, ``x * dt(x)``.

    Args:
        in_channels: Channels C of the residual.

    Shape:
        - identity, residual: (N, C, H, W)
        - returns: ``dt``, broadcastable to ``residual`` and of its dtype.

    Attributes:
        recurrent: Whether ``forward`` takes a third argument, the memory that the block before it
            returned (None for the first of a stage), and returns ``(dt, memory)``.
        means: Of (identity, residual), whether ``dt`` depends on each one's spatial mean, where it
            depends on nothing else; ``gate_of_means`` computes it then. None where it sees more.
        takes_map_size: Whether the constructor has an argument ``map_size``, the side of the
            stage's maps at the training resolution. Backbones fill it in.
    """

    recurrent = False
    means: tuple[bool, bool] | None = None
    takes_map_size = False
    _by_means_alone = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if 'gate_of_means' in vars(cls):
            cls._by_means_alone = True
        elif 'forward' in vars(cls) or 'gate' in vars(cls):
            # More than gate_of_means belongs to what it computes.
            cls._by_means_alone = False

    @property
    def computed_by_means(self) -> bool:
        """Whether ``gate_of_means`` is all of it, so that a training step may call that alone."""
        return self.means is not None and self._by_means_alone and 'forward' not in vars(self)

    def __init__(self, in_channels: int):
        super().__init__()
        self.in_channels = check_channels(in_channels)

    def forward(self, identity: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return identity * self.gate(identity)
        if self.means is None or type(self).gate is not StepSize.gate:
            return self.gate(residual)
        return self._by_means(identity, residual)

    def _by_means(self, identity: Tensor | None, residual: Tensor) -> Tensor:
        of_identity, of_residual = self.means
        # The residual first: it has just been written and is still in the cache.
        residual_mean = spatial_mean(residual) if of_residual else None
        identity_mean = spatial_mean(identity) if of_identity else None
        dt = self.gate_of_means(identity_mean, residual_mean)
        return dt.to(residual.dtype)[:, :, None, None]

    def gate(self, residual: Tensor) -> Tensor:
        """``dt`` from the residual ``f`` alone, (N, C, H, W) -> broadcastable to it."""
        if self.means is None:
            raise NotImplementedError(f'{type(self).__name__} has to implement gate(residual)')
        return self._by_means(None, residual)

    def gate_of_means(self, identity_mean: Tensor | None, residual_mean: Tensor | None) -> Tensor:
        """``dt`` (N, C) from spatial means (N, C), those that :attr:`means` asks for."""
        raise NotImplementedError(f'{type(self).__name__} has no gate of means alone')

    def reset_parameters(self) -> None:
        """Put every parameter back to its initial distribution."""
        for module in self.children():
            for layer in module.modules():
                if hasattr(layer, 'reset_parameters'):
                    layer.reset_parameters()
