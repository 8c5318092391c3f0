import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmstepnet.models import StepNetAdaptor
from mmstepnet.models.step_sizes.stepnet import INPUTS

SIGMOID_OF_MINUS_ONE = 0.2689414213699951


def trained_adaptor(channels, inputs='pair', dtype=torch.float64):
    """An adaptor far from its start: every parameter and statistic is random."""
    adaptor = StepNetAdaptor(channels, inputs=inputs).to(dtype)
    with torch.no_grad():
        for tensor in adaptor.parameters():
            tensor.normal_()
        adaptor.norm.running_mean.normal_()
        adaptor.norm.running_var.uniform_(0.5, 2)
    return adaptor


def states(samples=3, channels=5, dtype=torch.float64):
    return torch.randn(2, samples, channels, 4, 6, dtype=dtype)


def reference(adaptor, x, f, training):
    """Equation 12 step by step with torch's own layers, on the materialised next state."""
    coarse = {'current': [x], 'next': [x + f], 'difference': [f], 'pair': [x, x + f]}
    pooled = [F.adaptive_avg_pool2d(state, 1) for state in coarse[adaptor.inputs]]
    interleaved = torch.stack(pooled, 2).flatten(1, 2)
    channels = x.shape[1]
    conv = nn.Conv2d(len(pooled) * channels, channels, 1, groups=channels, bias=False).double()
    norm = nn.BatchNorm2d(channels).double().train(training)
    with torch.no_grad():
        conv.weight.copy_(adaptor.weight.view_as(conv.weight))
        for key, value in norm.state_dict().items():
            value.copy_(adaptor.norm.state_dict()[key])
    u = norm(conv(interleaved))
    gate = adaptor.scale[:, None, None] * u + adaptor.shift[:, None, None]
    return torch.sigmoid(gate), norm


@pytest.mark.parametrize('inputs', INPUTS)
def test_every_step_starts_at_sigmoid_of_minus_one(inputs):
    x, f = states(dtype=torch.float32)
    dt = StepNetAdaptor(5, inputs=inputs)(x, f)
    assert torch.allclose(dt, torch.full((3, 5, 1, 1), SIGMOID_OF_MINUS_ONE), rtol=1e-6)


@pytest.mark.parametrize('inputs, expected', [('pair', 6), ('current', 5), ('next', 5)])
def test_parameters_a_channel(inputs, expected):
    adaptor = StepNetAdaptor(7, inputs=inputs)
    assert sum(p.numel() for p in adaptor.parameters()) == 7 * expected


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('inputs', INPUTS)
def test_equals_the_step_by_step_reference(inputs, training):
    adaptor = trained_adaptor(5, inputs).train(training)
    x, f = states()
    expected, norm = reference(adaptor, x, f, training)
    assert torch.allclose(adaptor(x, f), expected, rtol=0, atol=1e-13)
    for key, value in norm.state_dict().items():
        assert torch.allclose(adaptor.norm.state_dict()[key], value, rtol=1e-12)


def test_a_channel_sees_only_itself():
    adaptor = trained_adaptor(5)
    x, f = states()
    before = adaptor(x, f)
    for state in (x, f):
        changed = state.clone()
        changed[:, 2] += torch.rand(3, 4, 6, dtype=torch.float64)
        after = adaptor(changed, f) if state is x else adaptor(x, changed)
        moved = (after - before).abs().amax((0, 2, 3)) > 1e-6
        assert moved.tolist() == [False, False, True, False, False]


def test_depends_on_its_inputs_only_through_their_spatial_means():
    adaptor = trained_adaptor(5)
    x, f = states()
    order = torch.randperm(24)
    shuffled = [state.flatten(2)[..., order].view_as(state) for state in (x, f)]
    assert torch.allclose(adaptor(x, f), adaptor(*shuffled), rtol=0, atol=1e-13)


@pytest.mark.parametrize('inputs', INPUTS)
def test_gradients_in_every_mode(inputs):
    adaptor = trained_adaptor(2, inputs)
    x, f = (state.requires_grad_() for state in states(channels=2))
    parameters = dict(adaptor.named_parameters())

    def step(x, f, *values):
        names = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(adaptor, names, (x, f))

    assert torch.autograd.gradcheck(step, (x, f, *parameters.values()))
    adaptor(x, f).square().sum().backward()
    # A mean's shift and a constant factor vanish in the batch norm, up to eps.
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_one_sample_trains_on_the_running_statistics():
    adaptor = trained_adaptor(5).train()
    before = copy.deepcopy(adaptor.norm.state_dict())
    x, f = states(samples=1)
    expected, _ = reference(adaptor, x, f, training=False)
    dt = adaptor(x, f)
    assert torch.allclose(dt, expected, rtol=0, atol=1e-13)
    dt.sum().backward()
    assert all(p.grad is not None for p in adaptor.parameters())
    after = adaptor.norm.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_pools_in_float32(dtype):
    adaptor = trained_adaptor(5, dtype=torch.float32).eval()
    # The mean of 1 and 4095 copies of 1 + eps needs more digits than a half-precision sum has.
    x = torch.full((2, 5, 64, 64), 1.0, dtype=dtype)
    x[..., 1:] += torch.finfo(dtype).eps
    f = torch.randn(2, 5, 64, 64).to(dtype)
    dt = adaptor(x, f)
    assert dt.dtype == dtype
    assert torch.equal(dt, adaptor(x.float(), f.float()).to(dtype))


def test_autocast():
    adaptor = trained_adaptor(5, dtype=torch.float32)
    x, f = states(dtype=torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        dt = adaptor(x.bfloat16(), f.bfloat16())
    assert dt.dtype == torch.bfloat16
    assert torch.allclose(
        dt.float(), adaptor(x.bfloat16().float(), f.bfloat16().float()), atol=4e-3
    )


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('inputs', INPUTS)
def test_a_module_of_half_precision(inputs, training):
    adaptor = trained_adaptor(5, inputs, dtype=torch.float32).train(training)
    x, f = states(samples=8, dtype=torch.float32)
    expected = adaptor(x, f)
    half = copy.deepcopy(adaptor).bfloat16()
    dt = half(x.bfloat16(), f.bfloat16())
    assert dt.dtype == torch.bfloat16
    # bfloat16 has 8 bits; mixing, norm and gate each round a logit of a few units once.
    assert torch.allclose(dt.float(), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize('inputs', INPUTS)
def test_deployed_adaptor_equals_the_trained_one(inputs):
    adaptor = trained_adaptor(5, inputs).eval()
    x, f = states()
    expected = adaptor(x, f)
    for _ in range(2):
        adaptor.switch_to_deploy()
        assert torch.allclose(adaptor(x, f), expected, rtol=0, atol=1e-13)
    assert not list(adaptor.parameters())
    assert set(adaptor.state_dict()) == {'weight', 'bias'}


def test_deployment_is_refused_in_training_mode():
    with pytest.raises(RuntimeError, match='call eval'):
        StepNetAdaptor(5).train().switch_to_deploy()


def test_one_tensor_is_refused_with_the_right_position():
    with pytest.raises(TypeError, match="position='residual_step'"):
        StepNetAdaptor(5)(torch.rand(1, 5, 2, 2))


@pytest.mark.parametrize('inputs', ['both', None, 'Pair'])
def test_unknown_inputs(inputs):
    with pytest.raises(ValueError, match='inputs must be one of pair, current, next, difference'):
        StepNetAdaptor(5, inputs=inputs)


@pytest.mark.parametrize('channels', [0, -1, 2.0, True, None])
def test_bad_channels(channels):
    with pytest.raises(ValueError, match='in_channels must be a positive int'):
        StepNetAdaptor(channels)
