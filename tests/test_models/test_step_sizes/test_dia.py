import copy

import pytest
import torch
from torch import nn

from mmstepnet.models import StepResNetCifar
from mmstepnet.models.step_sizes import DIA
from tests.ranks import run_ranks

PLUGINS = [dict(cfg=dict(type='mmstepnet.DIA'))]


def _reference(cell, means):
    """The gates of consecutive blocks, (T, C) from their mean vectors (T, C), by torch's LSTM cell
    equations on plain matrices."""

    def bottleneck(mlp, x):
        hidden = (mlp[0].weight @ x + mlp[0].bias).clamp(min=0)
        return mlp[2].weight @ hidden + mlp[2].bias

    h = c = torch.zeros_like(means[0])
    outputs = []
    for x in means:
        i, f, g, o = (bottleneck(cell.input, x) + bottleneck(cell.hidden, h)).split(len(x))
        c = c / (1 + torch.exp(-f)) + torch.tanh(g) / (1 + torch.exp(-i))
        h = 1 / (1 + torch.exp(-o)) / (1 + torch.exp(-c))
        outputs.append(h)
    return torch.stack(outputs)


def _net(with_cp=False, seed=0, **kwargs):
    torch.manual_seed(seed)
    return StepResNetCifar(
        20, block='basic', widths=(4, 8, 8), plugins=PLUGINS, with_cp=with_cp, **kwargs
    )


def test_three_blocks_equal_a_float64_reference():
    torch.manual_seed(0)
    first = DIA(8, reduction=2).double()
    blocks = [first, DIA(8, reduction=2).double(), DIA(8, reduction=2).double()]
    for later in blocks[1:]:
        later.share(first)
    residuals = torch.randn(3, 2, 8, 4, 5, dtype=torch.float64) * 3
    memory = None
    for t, block in enumerate(blocks):
        dt, memory = block(residuals[t], residuals[t], memory)
        for n in range(2):
            expected = _reference(first.cell, residuals[: t + 1, n].mean((2, 3)))[-1]
            torch.testing.assert_close(dt[n].flatten(), expected, rtol=1e-12, atol=1e-12)


def test_a_stage_owns_one_cell_and_no_key_is_there_twice():
    net = _net()
    keys = [k for k in net.state_dict() if 'cell' in k]
    assert len(keys) == 3 * 8
    assert all('.0.step.step_size.cell.' in k for k in keys)
    for stage in net.stages:
        assert len({id(block.step.step_size.cell) for block in stage}) == 1
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    assert len(names) == len(set(names)) == len(list(net.parameters()))


def test_memory_flows_along_a_stage_and_restarts_at_the_next():
    net = _net().double().eval()
    seen = {}

    def recorder(step, identity, residual, dt):
        seen.setdefault(id(step), []).append((residual.mean((2, 3)), dt.flatten(1)))

    for block in net.blocks():
        block.step.recorder = recorder
    net(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    for stage in net.stages:
        recorded = [seen[id(block.step)][0] for block in stage]
        for n in range(2):
            means = torch.stack([mean[n] for mean, _ in recorded])
            expected = _reference(stage[0].step.step_size.cell, means)
            actual = torch.stack([dt[n] for _, dt in recorded])
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_the_mask_decides_who_owns_and_who_shares():
    masks = [[0, 1, 1], [0, 0, 0], [0, 0, 1]]
    plugins = [dict(cfg=dict(type='mmstepnet.DIA'), blocks=masks)]
    net = StepResNetCifar(20, block='basic', plugins=plugins)
    owners = {k.split('.step.')[0] for k in net.state_dict() if 'cell' in k}
    assert owners == {'layer1.1', 'layer3.2'}
    net(torch.randn(2, 3, 8, 8))[0].sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def _gradients(net, *inputs):
    """Gradients of the sum of squares, all forward passes before the one backward pass."""
    net.zero_grad()
    sum(net(x)[0].square().sum() for x in inputs).backward()
    return [p.grad.clone() for p in net.parameters()]


def test_checkpointing_gives_the_same_gradients():
    x = torch.randn(2, 3, 8, 8)
    plain, checkpointed = _net(), _net(with_cp=True)
    for a, b in zip(_gradients(plain, x), _gradients(checkpointed, x), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(plain.state_dict(), checkpointed.state_dict())


@pytest.mark.parametrize('with_cp', [False, True])
def test_two_forward_passes_before_backward_dont_touch_each_other(with_cp):
    # Evaluation mode: batch statistics would tie a pass to the running statistics of the other.
    net = _net(with_cp=with_cp).double().eval()
    first, second = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64)
    # Of another batch size, so that a memory left over would not even fit.
    second = second[:1]
    together = _gradients(net, first, second)
    apart = zip(_gradients(net, first), _gradients(net, second), strict=True)
    for both, (one, other) in zip(together, apart, strict=True):
        torch.testing.assert_close(both, one + other)


def test_a_copy_shares_its_own_cell_and_not_the_originals():
    net = _net()
    twin = copy.deepcopy(net)
    for stage, original in zip(twin.stages, net.stages, strict=True):
        cells = {id(block.step.step_size.cell) for block in stage}
        assert len(cells) == 1
        assert cells.isdisjoint({id(original[0].step.step_size.cell)})


def test_as_a_plugin_layer_it_says_what_to_write():
    with pytest.raises(TypeError, match="position='residual_step'"):
        DIA(8)(torch.zeros(1, 8, 2, 2))


def test_blocks_that_differ_cannot_share():
    with pytest.raises(ValueError, match=r'must be equal, got \(8, 4\) and \(8, 2\)'):
        DIA(8, reduction=2).share(DIA(8))


def _train_one_step(rank, world_size):
    net = nn.parallel.DistributedDataParallel(_net(with_cp=True).eval(), broadcast_buffers=False)
    torch.manual_seed(1)
    batch = torch.randn(world_size, 3, 8, 8)
    net(batch[rank : rank + 1])[0].square().sum().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.slow
def test_data_parallel_gradients_with_checkpointing_are_the_mean_over_ranks(tmp_path):
    actual, other = run_ranks(_train_one_step, 2, tmp_path, 2)
    assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True))
    net = _net().eval()
    torch.manual_seed(1)
    expected = _gradients(net, torch.randn(2, 3, 8, 8))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b / 2, rtol=1e-4, atol=1e-5)


def test_bfloat16_autocast_keeps_the_memory_in_float32():
    block = DIA(16)
    residual = torch.randn(2, 16, 4, 4)
    with torch.autocast('cpu', torch.bfloat16):
        dt, memory = block(residual.bfloat16(), residual.bfloat16())
        dt, memory = block(residual.bfloat16(), residual.bfloat16(), memory)
    assert (dt.dtype, memory.dtype) == (torch.bfloat16, torch.float32)
    exact, exact_memory = block(residual, residual)
    exact, exact_memory = block(residual, residual, exact_memory)
    torch.testing.assert_close(memory, exact_memory, atol=0.02, rtol=0.02)
    torch.testing.assert_close(dt.float(), exact, atol=0.02, rtol=0.02)
