"""Batch norm for pooled features, where a batch has one value a sample and channel."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

_TWO = (
    'a batch norm over two samples makes every pooled feature +1 or -1: train with more pictures '
    'a GPU, or on several GPUs, whose samples count together'
)


class PooledBatchNorm(nn.BatchNorm1d):
    """Batch norm over (N, C) features such as spatial means.

    A detector sees two pictures a GPU: normalised over two samples every pooled feature becomes +1
    or -1, whatever it was. So statistics are taken over all ranks (Peng et al.: MegDet, CVPR 2018,
    https://arxiv.org/abs/1711.07240), on the CPU as on GPUs, and the running statistics agree
    between ranks by themselves. With one sample in all, which has no variance, the running
    statistics are used and left as they are.

    Args:
        num_features: C.
        sync: Take the statistics over all ranks of a distributed run, otherwise over this one's
            samples.
        **kwargs: As for ``torch.nn.BatchNorm1d``.
    """

    def __init__(self, num_features: int, sync: bool = True, **kwargs):
        super().__init__(num_features, **kwargs)
        self.sync = sync

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        if self.sync and dist.is_initialized() and dist.get_world_size() > 1:
            return self._forward_all_ranks(x)
        if len(x) == 2 and not torch.compiler.is_compiling():
            warnings.warn(_TWO)
        return super().forward(x) if len(x) > 1 else self._by_running_statistics(x)

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def _forward_all_ranks(self, x: Tensor) -> Tensor:
        # One reduction of count, sum and sum of squares; float64 takes the cancellation in the
        # variance.
        exact = x.double()
        count = exact.new_full((1,), len(x))
        total = all_reduce(torch.cat((count, exact.sum(0), exact.square().sum(0))))
        count, (mean, square) = total[0], total[1:].view(2, -1) / total[0]
        var = (square - mean.square()).clamp(min=0)
        # Chosen on the device, which need not be waited for then.
        few = count < 2
        mean = torch.where(few, self.running_mean.double(), mean)
        var = torch.where(few, self.running_var.double(), var)
        self._update(mean.detach(), (var * count / (count - 1).clamp(min=1)).detach(), ~few)
        normed = ((exact - mean) * torch.rsqrt(var + self.eps)).to(x.dtype)
        return torch.addcmul(self.bias, normed, self.weight)

    @torch.no_grad()
    def _update(self, mean: Tensor, unbiased_var: Tensor, counts: Tensor) -> None:
        self.num_batches_tracked += counts
        rate = self.momentum
        if rate is None:
            rate = self.num_batches_tracked.clamp(min=1).to(self.running_mean.dtype).reciprocal()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), rate)
