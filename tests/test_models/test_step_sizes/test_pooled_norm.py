import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mmstepnet.models.step_sizes.pooled_norm import PooledBatchNorm


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


def run_rank(rank, port, sizes, x, target, queue):
    dist.init_process_group(
        'gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=len(sizes)
    )
    try:
        norm = PooledBatchNorm(x.shape[1]).to(x.dtype)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        result = train_step(norm, x[mine], target[mine])
        for key in ('weight', 'bias'):  # what DistributedDataParallel does
            dist.all_reduce(result[key])
            result[key] /= len(sizes)
        queue.put((rank, {key: value.detach().numpy() for key, value in result.items()}))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(sizes, x, target, free_port):
    context = mp.get_context('spawn')
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, free_port, sizes, x, target, queue))
        for rank in range(len(sizes))
    ]
    for process in processes:
        process.start()
    results = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return [
        {key: torch.from_numpy(value) for key, value in results[rank].items()}
        for rank in range(len(sizes))
    ]


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_two_ranks_equal_one_process(dtype, free_port):
    x, target = torch.randn(2, 6, 4, dtype=dtype)
    expected = train_step(PooledBatchNorm(4).to(dtype), x, target)
    ranks = run_ranks((3, 3), x, target, free_port)
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
def test_one_sample_on_each_rank_has_statistics(free_port):
    x, target = torch.randn(2, 2, 4, dtype=torch.float64)
    ranks = run_ranks((1, 1), x, target, free_port)
    for result in ranks:
        torch.testing.assert_close(result['mean'], 0.1 * x.mean(0), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(result['var'], 0.9 + 0.1 * x.var(0), rtol=1e-12, atol=1e-15)
