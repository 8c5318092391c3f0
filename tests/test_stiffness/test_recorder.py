import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from mmstepnet.models.backbones import StepResNet
from mmstepnet.stiffness import TrajectoryRecorder, neural_stiffness_index

STEPNET = [dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), blocks='all', position='residual_step')]


def step_resnet(**kwargs):
    """A small ResNet whose gates differ from block to block, in evaluation mode."""
    model = StepResNet(18, base_channels=8, stem_channels=8, plugins=STEPNET, **kwargs)
    model.init_weights()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.running_var, 0.5, 2)
    for name, parameter in model.named_parameters():
        if '.step.' in name:
            nn.init.normal_(parameter)
    return model.eval()


def hooks_of(model):
    """Number of hooks and recorders in a model."""
    count = 0
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks)
        count += getattr(module, 'recorder', None) is not None
    return count


def listen(model, images):
    """State, residual and step size of each block, by hooks of our own on the step sizes."""
    heard = {}

    def hook(key):
        return lambda m, args, dt: heard.update({key: [t.double() for t in (*args, dt)]})

    handles = [
        module.register_forward_hook(hook(name.removesuffix('.step.step_size')))
        for name, module in model.named_modules()
        if name.endswith('.step.step_size')
    ]
    model(images)
    for handle in handles:
        handle.remove()
    return heard


@pytest.mark.parametrize('step', ['attention', 'unit'])
@torch.no_grad()
def test_own_blocks_against_hooks_of_our_own(step):
    model, images = step_resnet(), torch.randn(3, 3, 32, 32)
    heard = listen(model, images)
    with TrajectoryRecorder(model, step=step, exclude_first=False) as record:
        model(images)
    assert record.names == [f'layer{i}.{j}' for i in range(1, 5) for j in range(2)]
    assert record.stages.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(record) == 3
    for column, name in enumerate(record.names):
        x, f, dt = heard[name]
        increment = f * dt if step == 'unit' else f
        expected = increment.flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        torch.testing.assert_close(record.nsi[:, column], expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(record.dt[:, column], dt.mean(dim=(1, 2, 3)))
    assert record.dt.std() > 0.01


@torch.no_grad()
def test_images_keep_their_order_over_passes_of_any_size():
    model, images = step_resnet(), torch.randn(7, 3, 32, 32)
    with TrajectoryRecorder(model) as record:
        for batch in images.split((3, 1, 2, 1)):
            model(batch)
        assert len(record) == 7
        inside = record.nsi
    with TrajectoryRecorder(model) as one_by_one:
        for n in range(7):
            model(images[n : n + 1])
    torch.testing.assert_close(record.nsi, one_by_one.nsi, rtol=1e-5, atol=0)
    assert torch.equal(record.nsi, inside)
    assert record.names == ['layer1.1', 'layer2.1', 'layer3.1', 'layer4.1']


def test_autocast_records_what_the_network_computes():
    model, images = step_resnet(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        heard = listen(model, images)
        with TrajectoryRecorder(model) as record:
            model(images)
    x, f, _ = heard['layer2.1']
    expected = neural_stiffness_index(x, f)
    torch.testing.assert_close(record.nsi[:, 1], expected, rtol=1e-12, atol=0)


def test_checkpointed_blocks_are_recorded_once_per_pass():
    model, images = step_resnet(with_cp=True), torch.randn(2, 3, 32, 32)
    with TrajectoryRecorder(model) as record:
        sum(out.mean() for out in model(images)).backward()
        sum(out.mean() for out in model(images)).backward()
    assert len(record) == 4
    assert torch.equal(record.nsi[:2], record.nsi[2:])
    assert not record.nsi.requires_grad


def test_nothing_is_kept_alive():
    model, images = step_resnet(), torch.randn(2, 3, 32, 32)
    alive = []
    watch = [
        module.register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))
        for module in model.modules()
        if not isinstance(module, StepResNet)
    ]
    with TrajectoryRecorder(model) as record:
        model(images)
        gc.collect()
        assert len(alive) > 50
        assert all(ref() is None for ref in alive)
    assert record.nsi.grad_fn is None
    for handle in watch:
        handle.remove()


def test_hooks_go_whatever_happens():
    model = step_resnet()
    before = hooks_of(model)
    recorder = TrajectoryRecorder(model)
    with pytest.raises(KeyError), recorder:
        assert hooks_of(model) > before
        raise KeyError
    assert hooks_of(model) == before
    with recorder, pytest.raises(RuntimeError, match='already listening'):
        recorder.__enter__()
    assert hooks_of(model) == before


@torch.no_grad()
def test_a_pass_that_an_error_breaks_off():
    model, images = step_resnet(), torch.randn(2, 3, 32, 32)

    def out_of_memory(module, args):
        raise MemoryError

    record = TrajectoryRecorder(model)
    for _ in range(2):
        handle = model.layer3.register_forward_pre_hook(out_of_memory)
        with pytest.raises(MemoryError), record:
            model(images)
        handle.remove()
        with record:
            model(images)
    assert torch.equal(record.nsi[:2], record.nsi[2:])
    with record, model.layer3.register_forward_pre_hook(out_of_memory):
        with pytest.raises(MemoryError):
            model(images)
        with pytest.raises(RuntimeError, match='broke off, the with block has to be entered anew'):
            model(images)
    assert len(record) == 4


@torch.no_grad()
def test_a_gate_that_is_given_zeros_has_no_step_size():
    model = pytest.importorskip('timm').create_model('seresnet18').eval()
    with (
        pytest.raises(ValueError, match=r'layer1\.1, sample 0: .*zero-initialised last norm'),
        TrajectoryRecorder(model),
    ):
        model(torch.randn(1, 3, 32, 32))


def test_a_second_recorder_is_refused_and_leaves_the_first():
    model = step_resnet()
    with TrajectoryRecorder(model, exclude_first=False) as first:
        with pytest.raises(RuntimeError, match='recorded already'):
            TrajectoryRecorder(model).__enter__()
        with torch.no_grad():
            model(torch.randn(2, 3, 32, 32))
    assert len(first) == 2


@torch.no_grad()
def test_listening_again_goes_on():
    model, images = step_resnet(), torch.randn(2, 3, 32, 32)
    record = TrajectoryRecorder(model)
    for _ in range(2):
        with record:
            model(images)
    assert torch.equal(record.nsi[:2], record.nsi[2:])
    rows = record.take()
    assert rows.shape == (4, 3, 4) and len(record) == 0
    assert record.take().shape == (0, 3, 4)


@pytest.mark.parametrize(
    'value, what', [(0.0, 'norm zero'), (float('nan'), 'NaN or Inf'), (float('inf'), 'NaN or Inf')]
)
@torch.no_grad()
def test_features_without_an_index_are_named(value, what):
    model, images = step_resnet(), torch.randn(5, 3, 32, 32)

    def spoil(module, args):
        if args[0].shape[0] == 2:
            args[0][1] = value

    with model.layer3[1].step.register_forward_pre_hook(spoil):
        with (
            pytest.raises(ValueError, match=rf'layer3\.1, sample 4: .*{what}'),
            TrajectoryRecorder(model) as record,
        ):
            model(images[:3])
            model(images[3:])
        with TrajectoryRecorder(model, nan_policy='omit') as record:
            model(images[:3])
            model(images[3:])
    assert record.nsi[:, 2].isnan().tolist() == [False] * 4 + [True]


@torch.no_grad()
def test_a_step_size_that_is_not_finite_is_named():
    model = step_resnet()
    model.layer4[1].step.step_size.register_forward_hook(lambda m, args, dt: dt * float('nan'))
    with (
        pytest.raises(ValueError, match=r'layer4\.1, sample 0: .*step size'),
        TrajectoryRecorder(model),
    ):
        model(torch.randn(1, 3, 32, 32))


@torch.no_grad()
def test_every_block_runs_once():
    model = step_resnet()
    with (
        pytest.raises(RuntimeError, match=r'layer1\.1 ran a second time before layer2\.1'),
        TrajectoryRecorder(model),
    ):
        model.layer1(model.layer1(torch.randn(1, 8, 8, 8)))
    with (
        pytest.raises(RuntimeError, match=r'did not reach layer2\.1, layer3\.1, layer4\.1'),
        TrajectoryRecorder(model),
    ):
        model.layer1(torch.randn(1, 8, 8, 8))


def test_nothing_recorded():
    with TrajectoryRecorder(step_resnet()) as record:
        with pytest.raises(ValueError, match='nothing was recorded'):
            _ = record.nsi
        with pytest.raises(ValueError, match='nothing was recorded'):
            _ = record.dt


def test_bad_arguments():
    model = step_resnet()
    with pytest.raises(ValueError, match='step must'):
        TrajectoryRecorder(model, step='both')
    with pytest.raises(ValueError, match='nan_policy'):
        TrajectoryRecorder(model, nan_policy='ignore')


@pytest.mark.parametrize('copied', [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_copies_made_meanwhile_are_not_recorded(copied):
    model, images = step_resnet(), torch.randn(2, 3, 32, 32)
    with TrajectoryRecorder(model) as record:
        model(images)
        twin = copied(model)
        twin(images)
    assert len(record) == 2
    assert hooks_of(twin) == 0
    with TrajectoryRecorder(twin) as of_twin:
        twin(images)
    assert torch.equal(of_twin.nsi, record.nsi)
