"""The fused step against single operations (the plain path) and finite differences."""

import copy
import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mmstepnet.models import StepResNetCifar
from mmstepnet.models.layers import ResidualStep, plain_steps
from mmstepnet.models.layers.fused_step import FusedStep
from mmstepnet.models.step_sizes import ECA, IE, SEM, SRM, SqueezeExcitation, StepNetAdaptor

INPUTS = ('pair', 'current', 'next', 'difference')
STEP_SIZES = {
    **{inputs: (lambda c, inputs=inputs: StepNetAdaptor(c, inputs)) for inputs in INPUTS},
    'SE': lambda c: SqueezeExcitation(c, reduction=2),
    'ECA': ECA,
    'IE': IE,
    'SEM': lambda c: SEM(c, reduction=2),
}
CHANNELS = 4


def make(step_size='pair', norm='train', relu=True, dtype=torch.float64):
    """A step with random parameters, and its norm in training or evaluation mode, or none."""
    step = ResidualStep(
        STEP_SIZES[step_size](CHANNELS), nn.ReLU(inplace=True) if relu else None
    ).to(dtype)
    for parameter in step.parameters():
        nn.init.normal_(parameter)
    if norm == 'none':
        return step, None
    layer = nn.BatchNorm2d(CHANNELS, dtype=dtype).train(norm == 'train')
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return step, layer


def maps(dtype=torch.float64, samples=3):
    """State and residual; the residual's mean is far from 0, as a convolution's may be."""
    x, y = torch.randn(2, samples, CHANNELS, 3, 2, dtype=dtype)
    return x.requires_grad_(), (3 * y + 2).requires_grad_()


def is_fused(out):
    return type(out.grad_fn).__name__ == FusedStep.__name__ + 'Backward'


def run(step, norm, x, y, plain=False):
    """Output and every gradient of a random function of it."""
    inputs = [x, y, *step.parameters(), *([] if norm is None else norm.parameters())]
    if plain:
        with plain_steps():
            out = step(x, y, norm=norm)
    else:
        out = step(x, y, norm=norm)
    assert is_fused(out) != plain
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad(
        (out * weight).sum(), inputs, allow_unused=True, materialize_grads=True
    )
    return out, *grads


@pytest.mark.parametrize('relu', [True, False])
@pytest.mark.parametrize('norm', ['train', 'eval', 'none'])
@pytest.mark.parametrize('step_size', STEP_SIZES)
def test_gradients_are_those_of_finite_differences(step_size, norm, relu):
    step, layer = make(step_size, norm, relu)
    x, y = maps()
    assert is_fused(step(x, y, norm=layer))
    inputs = [x, y, *step.parameters(), *([] if layer is None else layer.parameters())]
    assert torch.autograd.gradcheck(lambda x, y, *_: step(x, y, norm=layer), inputs)


@pytest.mark.parametrize('norm', ['train', 'eval', 'none'])
@pytest.mark.parametrize('adaptor_training', [True, False])
@pytest.mark.parametrize('samples', [1, 3])
def test_equals_single_operations(norm, adaptor_training, samples):
    step, layer = make('pair', norm)
    step.train(adaptor_training)
    twin, twin_layer = copy.deepcopy((step, layer))
    x, y = maps(samples=samples)
    got, want = run(step, layer, x, y), run(twin, twin_layer, x, y, plain=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # Running statistics move alike.
    buffers = [*step.buffers(), *([] if layer is None else layer.buffers())]
    twins = [*twin.buffers(), *([] if layer is None else twin_layer.buffers())]
    for a, b in zip(buffers, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def worst_errors(got, exact):
    pairs = zip(got, exact, strict=True)
    return [float(((a.double() - b).abs().max() / b.abs().max()).detach()) for a, b in pairs]


@pytest.mark.parametrize('offset', [0, 3, 100])
@pytest.mark.parametrize('between', [0, 1])
def test_batch_statistics_are_as_exact_as_torchs(offset, between):
    """Output, gradients of maps, running statistics in float32, against torch's in float64."""
    torch.manual_seed(0)
    step, layer = make(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 8, CHANNELS, 24, 20, generator=generator)
    # Means far from 0 as against the deviation, that of each sample another or all the same.
    y += offset * torch.randn(8 if between else 1, CHANNELS, 1, 1, generator=generator)
    results = {}
    for name, plain, dtype in (
        ('fused', False, torch.float32),
        ('plain', True, torch.float32),
        ('exact', True, torch.float64),
    ):
        twin, norm = copy.deepcopy((step, layer))
        inputs = [t.to(dtype).requires_grad_() for t in (x, y)]
        of_maps = run(twin.to(dtype), norm.to(dtype), *inputs, plain=plain)[:3]
        results[name] = [*of_maps, norm.running_mean, norm.running_var]
    fused, plain = (worst_errors(results[name], results['exact']) for name in ('fused', 'plain'))
    for i, (ours, torchs) in enumerate(zip(fused, plain, strict=True)):
        # The last digit of y as against its deviation.
        assert ours <= 3 * torchs + 3e-7 * max(1, offset), (i, ours, torchs)


def test_channels_that_are_constant():
    step, layer = make(dtype=torch.float32)
    x, y = maps(torch.float32)
    with torch.no_grad():
        y[:, 0] = 0
        y[:, 1] = 7.3
        # Constant in every sample, but not over the batch.
        y[:, 2] = torch.arange(3.0)[:, None, None]
    got, want = run(step, layer, x, y), run(*copy.deepcopy((step, layer)), x, y, plain=True)
    assert all(a.isfinite().all() for a in got)
    # The last digit of 7.3, times 1 / sqrt(eps).
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=5e-4)
    # Behind a constant channel a gradient is 1 / sqrt(eps) times rounding.
    torch.testing.assert_close(got[2][:, 2:], want[2][:, 2:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('shape', [(3, 1, 1), (1, 3, 1), (2, 1, 5)])
def test_maps_of_a_pixel_or_a_line(shape):
    samples, height, width = shape
    step, layer = make()
    x, y = torch.randn(2, samples, CHANNELS, height, width, dtype=torch.float64)
    x, y = x.requires_grad_(), y.requires_grad_()
    got = run(step, layer, x, y)
    want = run(*copy.deepcopy((step, layer)), x, y, plain=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('step_size', STEP_SIZES)
@pytest.mark.parametrize('form', [torch.contiguous_format, torch.channels_last])
def test_inference_equals_single_operations(step_size, form):
    step, layer = make(step_size, 'eval')
    step.eval()
    x, y = (t.detach().contiguous(memory_format=form) for t in maps())
    before = x.clone(), y.clone()
    with torch.no_grad():
        got = step(x, y, norm=layer)
        with plain_steps():
            want = step(x, y, norm=layer)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert got.is_contiguous(memory_format=form)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize(
    'trained', [flags for flags in itertools.product([True, False], repeat=4) if any(flags)]
)
def test_only_what_is_trained_gets_a_gradient(trained):
    step, layer = make()
    x, y = maps()
    leaves = ([x], [y], list(step.parameters()), list(layer.parameters()))
    for group, on in zip(leaves, trained, strict=True):
        for leaf in group:
            leaf.requires_grad_(on)
    step(x, y, norm=layer).sum().backward()
    for group, on in zip(leaves, trained, strict=True):
        assert all((leaf.grad is not None) == on for leaf in group)


def test_the_gradient_given_is_left_alone():
    step, layer = make(relu=False)
    x, y = maps()
    given = torch.randn(x.shape, dtype=x.dtype)
    before = given.clone()
    step(x, y, norm=layer).backward(given)
    assert torch.equal(given, before)


def test_inputs_are_left_alone():
    step, layer = make()
    x, y = maps()
    before = x.clone(), y.clone()
    step(x, y, norm=layer).sum().backward()
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


def test_backward_twice_on_a_retained_graph():
    step, layer = make()
    x, y = maps()
    out = step(x, y, norm=layer).sum()
    first = torch.autograd.grad(out, [x, y], retain_graph=True)
    second = torch.autograd.grad(out, [x, y])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_later_change_of_mode_leaves_a_pass_alone():
    step, layer = make()
    x, y = maps()
    want = torch.autograd.grad(step(x, y, norm=layer).sum(), [x, y])
    out = step(x, y, norm=layer).sum()
    layer.eval()
    got = torch.autograd.grad(out, [x, y])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def saved_maps(out, x):
    """Storages of the size of a map that a graph keeps, apart from inputs and output."""
    kept = {}
    pending, seen = [out.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [n for n, _ in node.next_functions]
        names = [n for n in dir(node) if n.startswith('_saved_')]
        tensors = [getattr(node, n) for n in names] + list(getattr(node, 'saved_tensors', ()))
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.shape == x.shape:
                kept[t.untyped_storage().data_ptr()] = t
    return len(kept)


def test_keeps_the_norms_input_and_the_output_only():
    step, layer = make()
    x, y = maps()
    assert saved_maps(step(x, y, norm=layer), x) == 2
    with plain_steps():
        assert saved_maps(step(x, y, norm=layer), x) > 2


# Where single operations are needed ---------------------------------------------------------------


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize('hooked', [True, False])
@pytest.mark.parametrize('step_size', STEP_SIZES)
def test_nothing_of_a_pass_outlives_it(step_size, hooked):
    step, norm = make(step_size)
    x, y = maps()
    hooks = saved_tensors_hooks(Tensor.detach, lambda x: x) if hooked else nullcontext()
    with hooks:
        run(step, norm, x, y)
        before = live_tensors()
        for _ in range(3):
            run(step, norm, x, y)
        # A graph that owns itself is out of the garbage collector's sight, its tensors aren't.
        assert live_tensors() <= before


def test_hooks_on_saved_tensors_leave_the_gates_graph_alone():
    step, norm = make()
    x, y = maps()
    want = run(*copy.deepcopy((step, norm)), x, y)
    shapes = []

    def pack(x):
        shapes.append(x.shape)
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        got = run(step, norm, x, y)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    # What the step itself keeps goes through them, in one piece.
    assert sum(shape == x.shape for shape in shapes) >= 2


def test_second_derivatives_are_refused_and_the_way_out_works():
    step, layer = make('IE', 'eval')
    x, y = maps()
    with pytest.raises(RuntimeError, match='plain_steps'):
        torch.autograd.grad(step(x, y, norm=layer).sum(), x, create_graph=True)
    inputs = [x, y, *step.parameters()]
    with plain_steps():
        assert torch.autograd.gradgradcheck(lambda x, y, *_: step(x, y, norm=layer), inputs)


def test_the_default_is_on_cpus_where_it_was_measured(monkeypatch):
    def fuses():
        step, layer = make()
        x, y = (t.detach().to('meta').requires_grad_() for t in maps())
        return is_fused(step.to('meta')(x, y, norm=layer.to('meta')))

    assert not fuses()
    monkeypatch.setattr(ResidualStep, 'fuse', True)
    assert fuses()


def test_sharded_parameters_take_single_operations():
    step, layer = make('IE')
    x, y = maps()
    want = run(step, layer, x, y)
    twin = copy.deepcopy(step)
    # As fully sharded training does it for the time of the forward pass.
    leaves = {name: nn.Parameter(value.detach()) for name, value in twin.named_parameters()}
    for name, leaf in leaves.items():
        owner = twin.get_submodule(name.rpartition('.')[0])
        del owner._parameters[name.rpartition('.')[2]]
        setattr(owner, name.rpartition('.')[2], leaf * 1)
    out = twin(x, y, norm=layer)
    assert not is_fused(out)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), leaves.values())
    for got, expected in zip(grads, want[3 : 3 + len(leaves)], strict=True):
        torch.testing.assert_close(got, expected)


def test_plain_steps_ends_with_its_context():
    step, layer = make()
    x, y = maps()
    with pytest.raises(KeyError), plain_steps():
        raise KeyError
    assert is_fused(step(x, y, norm=layer))


def test_forward_mode_and_functional_transforms():
    step, layer = make('pair', 'eval')
    step.eval()
    x, y = (t.detach() for t in maps())
    dx, dy = torch.randn(2, *x.shape, dtype=x.dtype)

    def f(x, y):
        return step(x, y, norm=layer)

    out, tangent = torch.func.jvp(f, (x, y), (dx, dy))
    eps = 1e-6
    with torch.no_grad():
        difference = (f(x + eps * dx, y + eps * dy) - f(x - eps * dx, y - eps * dy)) / (2 * eps)
    torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-6)

    with torch.autograd.forward_ad.dual_level():
        dual = f(
            torch.autograd.forward_ad.make_dual(x, dx), torch.autograd.forward_ad.make_dual(y, dy)
        )
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)

    x.requires_grad_()
    want = torch.autograd.grad(f(x, y).sum(), x)[0]
    got = torch.func.grad(lambda x: f(x, y).sum())(x.detach())
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    batched = torch.func.vmap(f)(x.detach()[:, None], y[:, None])[:, 0]
    torch.testing.assert_close(batched, out, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('where', ['norm', 'step_size', 'activation'])
def test_hooks_are_heard(where):
    step, norm = make()
    x, y = maps()
    want = run(step, norm, x, y)[0]
    heard = []
    module = norm if where == 'norm' else getattr(step, where)
    module.register_forward_hook(lambda module, args, out: heard.append(out.detach().clone()))
    out = step(x, y, norm=norm)
    assert len(heard) == 1
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    if where == 'norm':
        torch.testing.assert_close(heard[0], copy.deepcopy(norm)(y))


def test_what_a_hook_on_the_norm_holds_is_not_overwritten():
    norm, step = nn.BatchNorm2d(CHANNELS), ResidualStep(activation=nn.ReLU(inplace=True))
    x, y = maps(torch.float32)
    held = []
    norm.register_forward_hook(lambda module, args, out: held.append(out))
    step(x, y, norm=norm)
    assert torch.equal(held[0], nn.BatchNorm2d(CHANNELS)(y))


def test_step_sizes_that_see_more_than_means_take_the_plain_path():
    step, norm = ResidualStep(SRM(CHANNELS).double(), nn.ReLU()), nn.BatchNorm2d(CHANNELS).double()
    x, y = maps()
    out = step(x, y, norm=norm)
    assert not is_fused(out)
    f = copy.deepcopy(norm)(y)
    want = torch.relu(x + f * copy.deepcopy(step.step_size)(x, f))
    torch.testing.assert_close(out, want)


def test_other_norms_are_applied_first():
    step, _ = make()
    norm = nn.GroupNorm(2, CHANNELS).double()
    x, y = maps()
    got, want = run(step, norm, x, y), run(step, norm, x, y, plain=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('norm', ['train', 'eval'])
@pytest.mark.parametrize('graph', [True, False])
def test_recorder_hears_f_and_dt(norm, graph):
    step, norm = make(norm=norm)
    x, y = maps()
    heard = []
    step.recorder = lambda *args: heard.append([a.detach().clone() for a in args[1:]])
    norm_before = copy.deepcopy(norm)
    with nullcontext() if graph else torch.no_grad():
        out = step(x, y, norm=norm)
    assert is_fused(out) == graph
    identity, f, dt = heard[0]
    assert torch.equal(identity, x)
    want = norm_before(y)
    torch.testing.assert_close(f, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dt, copy.deepcopy(step.step_size)(x, want))


# Formats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('norm', ['train', 'none'])
def test_channels_last_stays(norm, dtype):
    step, layer = make('pair', norm, dtype=torch.float32)
    x, y = (t.detach() for t in maps(torch.float32))
    want = run(step, layer, x.requires_grad_(), y.requires_grad_())
    form = torch.channels_last
    x, y = (t.detach().to(dtype, memory_format=form).requires_grad_() for t in (x, y))
    got = run(step, layer, x, y)
    for a in got[:3]:
        assert a.is_contiguous(memory_format=form) and a.dtype == dtype
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.1, atol=0.1)
    torch.testing.assert_close(got[0].float(), want[0], **tolerance)
    # 8 bits of mantissa: compare gradients as wholes.
    for a, b in zip(got[1:], want[1:], strict=True):
        limit = 1e-4 if dtype == torch.float32 else 0.05
        assert (a.float() - b).norm() <= limit * b.norm()


def test_inference_writes_into_the_norms_output():
    step, norm = make('pair', 'eval')
    step.eval()
    x, y = maps()
    kept = []
    step.activation.register_forward_hook(lambda module, args, out: kept.append(out.data_ptr()))
    f_pointer = []
    norm_forward = norm.forward

    def forward(y):
        f = norm_forward(y)
        f_pointer.append(f.data_ptr())
        return f

    norm.forward = forward
    with torch.no_grad():
        out = step(x, y, norm=norm)
    assert out.data_ptr() == f_pointer[0] == kept[0]
    f = norm_forward(y)
    torch.testing.assert_close(out, torch.relu(x + f * step.step_size(x, f)))


# Training -----------------------------------------------------------------------------------------


def fused_nodes(loss):
    """How many fused steps the graph of a loss has."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [n for n, _ in node.next_functions]
    return sum(type(node).__name__ == 'FusedStepBackward' for node in seen)


def train_on_digits(plain, dtype, steps=100):
    """Losses and final weights of a small classifier of handwritten digits."""
    data = pytest.importorskip('sklearn.datasets').load_digits()
    pictures = torch.tensor(data.images[:512] / 8 - 1, dtype=dtype)[:, None]
    labels = torch.tensor(data.target[:512])
    torch.manual_seed(0)
    adaptor = dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))
    backbone = StepResNetCifar(
        8, block='basic', widths=(8, 8, 16), in_channels=1, plugins=[adaptor]
    )
    backbone.init_weights()
    model = nn.ModuleList([backbone, nn.Linear(16, 10)]).to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for i in range(steps):
        batch = torch.arange(32 * i, 32 * i + 32) % len(labels)
        with plain_steps() if plain else nullcontext():
            scores = model[1](backbone(pictures[batch])[-1].mean((2, 3)))
            loss = nn.functional.cross_entropy(scores, labels[batch])
            assert fused_nodes(loss) == (0 if plain else 3)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.stack(losses), weights


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_a_hundred_training_steps_agree_to_rounding(dtype, tolerance):
    fused, plain = (train_on_digits(plain, dtype) for plain in (False, True))
    assert fused[0][-10:].mean() < 0.5 * fused[0][:10].mean()
    for a, b in zip(fused, plain, strict=True):
        error = float((a - b).norm() / b.norm())
        assert error <= tolerance, error
