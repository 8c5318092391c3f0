"""What every step size that needs the residual alone has in common."""

import pytest
import torch

from mmstepnet.models.step_sizes import (
    CBAM,
    ECA,
    FCA,
    IE,
    SEM,
    SGE,
    SRM,
    SqueezeExcitation,
    StepNetAblation,
    StepNetAdaptor,
)
from mmstepnet.registry import MODELS

STEP_SIZES = [CBAM, ECA, FCA, IE, SEM, SGE, SRM, SqueezeExcitation]
every = pytest.mark.parametrize('kind', STEP_SIZES)


def _randomised(kind, channels=64):
    torch.manual_seed(0)
    step_size = kind(channels)
    with torch.no_grad():
        for param in step_size.parameters():
            param.normal_(std=0.5)
    return step_size


@every
def test_identity_is_ignored_and_a_plugin_call_scales(kind):
    step_size = _randomised(kind).eval()
    x, other = torch.randn(2, 3, 64, 6, 5)
    dt = step_size(other, x)
    assert torch.equal(step_size(x, x), dt)
    torch.testing.assert_close(step_size(x), x * dt)


@every
@pytest.mark.parametrize('shape', [(1, 64, 1, 1), (1, 64, 5, 3), (3, 128, 1, 1), (2, 192, 33, 40)])
def test_any_size_gives_gates_and_every_parameter_a_gradient(kind, shape):
    step_size = _randomised(kind, shape[1]).train()
    x = torch.randn(shape, requires_grad=True)
    dt = step_size(x, x)
    assert torch.all((dt >= 0) & (dt <= 1))
    assert torch.broadcast_shapes(dt.shape, x.shape) == x.shape
    (dt * x).sum().backward()
    assert x.grad.isfinite().all()
    for name, param in step_size.named_parameters():
        assert param.grad is not None and param.grad.isfinite().all(), name


@every
def test_samples_dont_see_each_other_in_evaluation(kind):
    step_size = _randomised(kind).eval()
    x = torch.randn(3, 64, 4, 4)
    dt = step_size(x, x)
    for n in range(3):
        torch.testing.assert_close(step_size(x[n : n + 1], x[n : n + 1]), dt[n : n + 1])


@every
def test_bfloat16_autocast_stays_close(kind):
    step_size = _randomised(kind).eval()
    x = torch.randn(2, 64, 8, 8).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        dt = step_size(x, x)
    assert dt.dtype == torch.bfloat16
    exact = step_size(x.float(), x.float())
    torch.testing.assert_close(dt.float(), exact, atol=0.05, rtol=0)


@every
def test_reset_parameters_restores_the_start(kind):
    torch.manual_seed(3)
    fresh = kind(64)
    step_size = _randomised(kind)
    torch.manual_seed(3)
    step_size.reset_parameters()
    for name, value in step_size.state_dict().items():
        torch.testing.assert_close(value, fresh.state_dict()[name], msg=name)


@every
def test_is_built_by_its_name(kind):
    built = MODELS.build(dict(type=f'mmstepnet.{kind.__name__}', in_channels=64))
    assert type(built) is kind


@every
def test_is_a_plugin_of_an_unmodified_mmdet_resnet(kind):
    mmdet_resnet = pytest.importorskip('mmdet.models').ResNet
    torch.manual_seed(0)
    plugin = dict(cfg=dict(type=f'mmstepnet.{kind.__name__}'), position='after_conv3')
    stages = dict(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    net = mmdet_resnet(50, **stages, plugins=[dict(plugin, stages=(True,))])
    net.eval()
    x = torch.rand(1, 3, 32, 32)
    block = net.layer1[1]
    gate = getattr(block, block.after_conv3_plugin_names[0])
    assert type(gate) is kind
    seen = []
    # The block goes on in place: keep copies.
    gate.register_forward_hook(lambda module, args, out: seen.append((args[0], out.clone())))
    net(x)
    residual, scaled = seen[0]
    torch.testing.assert_close(scaled, residual * gate(residual, residual))


WHOLE = [(kind, {}) for kind in STEP_SIZES]
WHOLE += [(StepNetAdaptor, {}), *((StepNetAblation, dict(variant=v)) for v in 'abcd')]


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kind, kwargs', WHOLE)
def test_a_module_turned_to_half_precision(kind, kwargs, dtype):
    torch.manual_seed(0)
    step_size = kind(64, **kwargs).eval()
    x, f = torch.randn(2, 2, 64, 6, 6)
    want = step_size(x, f)
    dt = step_size.to(dtype)(x.to(dtype), f.to(dtype))
    assert dt.dtype == dtype
    torch.testing.assert_close(dt.float(), want, rtol=0.05, atol=0.02)
