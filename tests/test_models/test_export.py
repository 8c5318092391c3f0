"""torch.compile without graph breaks, torch.export, and ONNX checked by onnxruntime."""

import copy

import pytest
import torch

from mmstepnet.models import StepResNet, StepResNetCifar, switch_to_deploy
from mmstepnet.models.step_sizes import FCA, SRM

from .test_deploy import classifier, plugin, randomise  # noqa: F401

STEP_SIZES = (
    'StepNetAdaptor',
    'SqueezeExcitation',
    'ECA',
    'CBAM',
    'SRM',
    'FCA',
    'SGE',
    'SEM',
    'IE',
    'DIA',
)


def small(step_size='StepNetAdaptor', **kwargs):
    # Two stages: one block of each kind of shortcut and stride, and little to compile.
    return StepResNet(
        18,
        base_channels=64,
        num_stages=2,
        strides=(1, 2),
        dilations=(1, 1),
        out_indices=(0, 1),
        norm_eval=False,
        plugins=plugin(step_size) if step_size else None,
        **kwargs,
    )


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize('step_size', [None, *STEP_SIZES])
def test_training_compiles_to_one_graph(step_size):
    model = small(step_size).train()
    # Some start with gates that don't look at their input: a graph could lose that path unseen.
    for name, parameter in model.named_parameters():
        if '.step_size.' in name:
            torch.nn.init.normal_(parameter, std=0.5)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(twin, fullgraph=True, backend='aot_eager')
    for net in (model, compiled):
        sum(level.square().mean() for level in net(x)).backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a.grad.any(), name
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4, msg=name)
    for (name, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=name)


def test_compiled_inference_equals():
    model = randomise(small())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = model(x)
        got = torch.compile(model, fullgraph=True, backend='aot_eager')(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def batch_and_size():
    height = 16 * torch.export.Dim('height', min=2, max=32)
    width = 16 * torch.export.Dim('width', min=2, max=32)
    return {0: torch.export.Dim('batch', min=1, max=16), 2: height, 3: width}


@pytest.mark.parametrize('step_size', STEP_SIZES)
def test_torch_export_with_dynamic_batch(step_size):
    model = randomise(small(step_size))
    program = torch.export.export(
        model,
        (torch.randn(2, 3, 64, 64),),
        dynamic_shapes=({0: torch.export.Dim('batch', min=1, max=16)},),
    )
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        for a, b in zip(program.module()(x), model(x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def onnx_outputs(model, example, dynamic, path, pictures):
    """Outputs of onnxruntime on each of the pictures."""
    pytest.importorskip('onnxscript')
    runtime = pytest.importorskip('onnxruntime')
    torch.onnx.export(
        model, (example,), path, dynamic_shapes=(dynamic,), dynamo=True, verbose=False
    )
    session = runtime.InferenceSession(path, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name
    return [
        [torch.from_numpy(out) for out in session.run(None, {name: x.numpy()})] for x in pictures
    ]


@pytest.mark.parametrize('deploy', [False, True])
def test_onnx_of_a_detectors_backbone(deploy, tmp_path):
    model = randomise(small())
    pictures = [torch.randn(1, 3, 64, 96), torch.randn(3, 3, 128, 64)]
    with torch.no_grad():
        want = [model(x) for x in pictures]
    if deploy:
        switch_to_deploy(model)
    example = torch.randn(2, 3, 64, 96)
    got = onnx_outputs(model, example, batch_and_size(), str(tmp_path / 'model.onnx'), pictures)
    for a, b in zip(got, want, strict=True):
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


def test_onnx_of_a_classifier(classifier, tmp_path):  # noqa: F811
    pictures = [torch.randn(1, 3, 32, 32), torch.randn(3, 3, 48, 64)]
    with torch.no_grad():
        want = [classifier(x) for x in pictures]
    switch_to_deploy(classifier)
    example = torch.randn(2, 3, 48, 64)
    got = onnx_outputs(
        classifier, example, batch_and_size(), str(tmp_path / 'model.onnx'), pictures
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[0], b, rtol=1e-3, atol=1e-4)


def test_pre_activated_nets_compile_too():
    model = StepResNetCifar(20, block='basic', pre_activation=True, plugins=plugin('IE')).train()
    torch.compile(model, fullgraph=True, backend='aot_eager')(torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize('kind, kwargs, side', [(FCA, dict(dct_size=7), 7), (SRM, {}, 4)])
def test_an_exported_step_size_takes_maps_of_any_size(kind, kwargs, side, tmp_path):
    torch.manual_seed(0)
    step_size = kind(32, **kwargs).eval()
    with torch.no_grad():
        for parameter in step_size.parameters():
            parameter.normal_(std=0.5)
    pictures = [torch.randn(shape) for shape in ((1, 32, side, side), (3, 32, 1, 1), (2, 32, 9, 5))]
    sizes = {2: torch.export.Dim('h', min=1), 3: torch.export.Dim('w', min=1)}
    example = torch.randn(2, 32, side, side)
    dynamic = {0: torch.export.Dim('batch', min=1), **sizes}
    path = tmp_path / 'step_size.onnx'
    for x, (got,) in zip(
        pictures, onnx_outputs(step_size, example, dynamic, path, pictures), strict=True
    ):
        with torch.no_grad():
            torch.testing.assert_close(got, step_size(x), rtol=1e-4, atol=1e-4)
