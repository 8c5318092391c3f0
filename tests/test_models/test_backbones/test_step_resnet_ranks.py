"""The detectors' backbone, stages frozen and norms in evaluation mode, on one and on two ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmstepnet.models import StepResNet


def backbone(with_cp):
    """The same weights in every process; the step sizes are fresh, as over a plain checkpoint."""
    torch.manual_seed(1)
    model = StepResNet(
        18,
        base_channels=8,
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))],
        frozen_stages=1,
        norm_eval=True,
        with_cp=with_cp,
    ).double()
    with torch.no_grad():
        for step in model.steps().values():
            for parameter in step.step_size.parameters():
                nn.init.normal_(parameter)
    return model.train()


def train_step(model, x):
    """Gradients of a loss that is a mean over samples, and the statistics afterwards."""
    loss = sum(level.square().flatten(1).mean(1).mean() for level in model(x))
    loss.backward()
    trained = getattr(model, 'module', model)
    return {
        'gradients': {n: p.grad for n, p in trained.named_parameters() if p.grad is not None},
        'statistics': {n: b for n, b in trained.named_buffers() if '.step_size.' in n},
    }


def run_rank(rank, port, with_cp, x, queue):
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
    try:
        model = DistributedDataParallel(backbone(with_cp), broadcast_buffers=False)
        result = train_step(model, x.chunk(2)[rank])
        queue.put({k: {n: t.numpy() for n, t in part.items()} for k, part in result.items()})
        dist.barrier()
    finally:
        del model
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize('with_cp', [False, True])
def test_two_ranks_train_as_one_process(with_cp, free_port):
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    expected = train_step(backbone(with_cp), x)
    assert any('layer1.0.step.' in name for name in expected['gradients'])
    assert 'layer1.0.conv1.weight' not in expected['gradients']

    context = mp.get_context('spawn')
    queue = context.SimpleQueue()
    ranks = [
        context.Process(target=run_rank, args=(rank, free_port, with_cp, x, queue))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    results = [queue.get() for _ in ranks]
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    for result in results:
        for kind, tensors in expected.items():
            assert result[kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(
                    torch.from_numpy(result[kind][name]), tensor, rtol=1e-9, atol=1e-14
                )
