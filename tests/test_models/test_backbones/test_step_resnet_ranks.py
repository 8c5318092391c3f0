"""The detectors' backbone, stages frozen and norms in evaluation mode, on one and on two ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmstepnet.models import StepResNet
from tests.ranks import run_ranks


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


def train_share(rank, with_cp, x):
    model = DistributedDataParallel(backbone(with_cp), broadcast_buffers=False)
    return train_step(model, x.chunk(2)[rank])


@pytest.mark.slow
@pytest.mark.parametrize('with_cp', [False, True])
def test_two_ranks_train_as_one_process(with_cp, tmp_path):
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    expected = train_step(backbone(with_cp), x)
    assert any('layer1.0.step.' in name for name in expected['gradients'])
    assert 'layer1.0.conv1.weight' not in expected['gradients']

    results = run_ranks(train_share, 2, tmp_path, with_cp, x)
    for result in results:
        for kind, tensors in expected.items():
            assert result[kind].keys() == tensors.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(result[kind][name], tensor, rtol=1e-9, atol=1e-14)
