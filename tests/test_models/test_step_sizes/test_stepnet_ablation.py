import pytest
import torch

from mmstepnet.models import StepResNetCifar
from mmstepnet.models.step_sizes import StepNetAblation, StepNetAdaptor
from mmstepnet.models.step_sizes.stepnet import INPUTS

C = 16
EVERY = [(variant, inputs) for variant in 'abcd' for inputs in INPUTS]


def _randomised(variant, inputs='pair'):
    adaptor = StepNetAblation(C, variant, inputs=inputs, reduction=4).double()
    with torch.no_grad():
        for param in adaptor.parameters():
            param.normal_()
    return adaptor


def _means(x, f, inputs):
    seen = {'pair': [x, x + f], 'current': [x], 'next': [x + f], 'difference': [f]}[inputs]
    return [state.mean((2, 3)) for state in seen]


@pytest.mark.parametrize(('variant', 'inputs'), EVERY)
def test_equals_a_float64_reference_and_every_parameter_gets_a_gradient(variant, inputs):
    adaptor = _randomised(variant, inputs)
    x, f = torch.randn(2, 5, C, 3, 4, dtype=torch.float64)
    means = _means(x, f, inputs)
    if variant == 'a':
        hidden = (torch.cat(means, 1) @ adaptor.mlp[0].weight.T).clamp(min=0)
        mixed = hidden @ adaptor.mlp[2].weight.T
    else:
        weights = adaptor.weight if variant != 'd' else adaptor.weight.expand(C, -1)
        mixed = torch.stack(
            [sum(m[:, c] * w for m, w in zip(means, weights[c], strict=True)) for c in range(C)], 1
        )
    if variant != 'c':
        centred = mixed - mixed.mean(0)
        spread = (centred.square().mean(0) + 1e-5).sqrt()
        mixed = centred / spread * adaptor.norm.weight + adaptor.norm.bias
    if variant != 'b':
        mixed = mixed * adaptor.scale + adaptor.shift
    expected = 1 / (1 + torch.exp(-mixed))
    dt = adaptor(x, f)
    torch.testing.assert_close(dt, expected[:, :, None, None])
    dt.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adaptor.parameters())


@pytest.mark.parametrize(
    ('variant', 'parameters'),
    [('a', 2 * C * 4 + 4 * C + 4 * C), ('b', 4 * C), ('c', 4 * C), ('d', 2 + 4 * C)],
)
def test_parameters(variant, parameters):
    adaptor = StepNetAblation(C, variant, reduction=4)
    assert sum(p.numel() for p in adaptor.parameters()) == parameters


@pytest.mark.parametrize('variant', ['a', 'c', 'd'])
def test_with_ie_every_step_starts_at_sigmoid_of_minus_one(variant):
    x, f = torch.randn(2, 3, C, 4, 4)
    dt = StepNetAblation(C, variant)(x, f)
    torch.testing.assert_close(dt, torch.full((3, C, 1, 1), 0.26894143))


def test_variant_d_is_the_adaptor_with_equal_weights():
    shared = _randomised('d')
    adaptor = StepNetAdaptor(C).double()
    state = shared.state_dict()
    adaptor.load_state_dict(dict(state, weight=state['weight'].expand(C, 2)))
    x, f = torch.randn(2, 3, C, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(shared(x, f), adaptor(x, f))


@pytest.mark.parametrize('variant', 'abcd')
def test_trains_in_a_network_from_one_sample(variant):
    plugin = dict(cfg=dict(type='mmstepnet.StepNetAblation', variant=variant))
    net = StepResNetCifar(11, widths=(4, 8, 8), plugins=[plugin])
    net.init_weights()
    net(torch.rand(1, 3, 8, 8))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_bad_arguments():
    with pytest.raises(ValueError, match="variant must be one of a, b, c, d, got 'e'"):
        StepNetAblation(C, 'e')
    with pytest.raises(ValueError, match='inputs must be one of'):
        StepNetAblation(C, 'a', inputs='both')
    with pytest.raises(ValueError, match='reduction=32 leaves no channel of in_channels=16'):
        StepNetAblation(C, 'a', reduction=32)
    with pytest.raises(TypeError, match="position='residual_step'"):
        StepNetAblation(C, 'b')(torch.zeros(1, C, 2, 2))
