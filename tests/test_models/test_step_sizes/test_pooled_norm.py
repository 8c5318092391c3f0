import pytest
import torch
import torch.distributed as dist
from torch import nn

from mmstepnet.models.step_sizes.pooled_norm import PooledBatchNorm
from tests.ranks import run_ranks


def train_step(norm, x, target):
    """Gradients of a loss that is the mean over samples, and the statistics afterwards."""
    x = x.clone().requires_grad_()
    loss = (norm(x) - target).square().sum(1).mean()
    loss.backward()
    return dict(
        x=x.grad,
        weight=norm.weight.grad,
        bias=norm.bias.grad,
        mean=norm.running_mean,
        var=norm.running_var,
    )


@pytest.mark.parametrize('momentum', [0.1, None])
def test_one_process_is_torchs_batch_norm(momentum):
    x, target = torch.randn(2, 6, 4)
    results = [
        train_step(norm, x, target)
        for norm in (PooledBatchNorm(4, momentum=momentum), nn.BatchNorm1d(4, momentum=momentum))
    ]
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def train_share(rank, sizes, x, target):
    norm = PooledBatchNorm(x.shape[1]).to(x.dtype)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    result = train_step(norm, x[mine], target[mine])
    for key in ('weight', 'bias'):  # what DistributedDataParallel does
        dist.all_reduce(result[key])
        result[key] /= len(sizes)
    return result


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_two_ranks_equal_one_process(dtype, tmp_path):
    x, target = torch.randn(2, 6, 4, dtype=dtype)
    expected = train_step(PooledBatchNorm(4).to(dtype), x, target)
    ranks = run_ranks(train_share, 2, tmp_path, (3, 3), x, target)
    tolerance = (
        dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-14)
    )
    for result in ranks:
        for key in ('weight', 'bias', 'mean', 'var'):
            torch.testing.assert_close(result[key], expected[key], **tolerance)
    # Each rank's loss is the mean over its half, so its gradients are twice as large.
    grad = torch.cat([result['x'] for result in ranks]) / 2
    torch.testing.assert_close(grad, expected['x'], **tolerance)


@pytest.mark.slow
def test_one_sample_on_each_rank_has_statistics(tmp_path):
    x, target = torch.randn(2, 2, 4, dtype=torch.float64)
    ranks = run_ranks(train_share, 2, tmp_path, (1, 1), x, target)
    for result in ranks:
        torch.testing.assert_close(result['mean'], 0.1 * x.mean(0), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(result['var'], 0.9 + 0.1 * x.var(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize('momentum', [0.1, None])
def test_one_sample_in_all_takes_the_running_statistics(momentum, tmp_path):
    norm = PooledBatchNorm(4, momentum=momentum).double()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    before = {key: value.clone() for key, value in norm.named_buffers()}
    x = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        out = norm._forward_all_ranks(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(out, norm.eval()(x), rtol=1e-14, atol=1e-14)
    slope = norm.weight / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(grad[0], slope.detach(), rtol=1e-14, atol=0)
    assert all(torch.equal(value, before[key]) for key, value in norm.named_buffers())


def test_two_samples_are_warned_of(recwarn):
    norm = PooledBatchNorm(4)
    out = norm(torch.randn(2, 4))
    torch.testing.assert_close(out.abs(), torch.ones(2, 4), rtol=0, atol=0.05)
    assert ['two samples' in str(warning.message) for warning in recwarn] == [True]
    recwarn.clear()
    norm(torch.randn(3, 4))
    norm.eval()(torch.randn(2, 4))
    assert not recwarn
