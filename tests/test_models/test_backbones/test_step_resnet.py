import copy

import pytest
import torch
import torchvision
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import nn

from mmstepnet.models import ResidualStep, StepNetAdaptor, StepResNet

ADAPTOR = dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def small(depth=18, plugins=(ADAPTOR,), norm_eval=False, **kwargs):
    """A narrow backbone: the tests of wiring don't need the width."""
    return StepResNet(depth, base_channels=8, plugins=list(plugins), norm_eval=norm_eval, **kwargs)


def randomise(model):
    """Give every parameter and running statistic a value that matters, step sizes included."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)
            else:
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith(('running_mean', 'running_var')):
                buffer.uniform_(0.5, 1.5)
    return model


def picture(samples=2, size=64):
    return torch.randn(samples, 3, size, size)


def run(model, x):
    """Outputs, gradients and running statistics of one training step."""
    outputs = model(x)
    sum(output.square().mean() for output in outputs).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return outputs, gradients, dict(model.named_buffers())


@pytest.fixture(scope='module')
def mmdet_resnet():
    return pytest.importorskip('mmdet.models.backbones.resnet').ResNet


# The reference: mmdet's ResNet ------------------------------------------------------------------


@pytest.mark.parametrize(
    'depth, options',
    [
        (18, {}),
        (50, {}),
        (50, dict(deep_stem=True, avg_down=True)),
        (50, dict(style='caffe', strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2))),
        (34, dict(num_stages=3, strides=(1, 2, 1), dilations=(1, 1, 1), out_indices=(0, 2))),
        (50, dict(in_channels=4, stem_channels=16, base_channels=8)),
    ],
)
@pytest.mark.smoke
def test_without_plugin_it_is_mmdets_resnet_bit_for_bit(mmdet_resnet, depth, options):
    theirs = randomise(mmdet_resnet(depth, norm_eval=False, **options))
    ours = StepResNet(depth, norm_eval=False, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, options.get('in_channels', 3), 64, 64)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        expected, got = run(theirs, x), run(ours, x)
        assert all(torch.equal(a, b) for a, b in zip(expected[0], got[0], strict=True))
        for a, b in zip(expected[1:], got[1:], strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize('options', [dict(frozen_stages=2), dict(norm_eval=True)])
def test_freezing_is_mmdets(mmdet_resnet, options):
    kwargs = dict(norm_eval=False) | options
    theirs, ours = mmdet_resnet(18, **kwargs), StepResNet(18, **kwargs)
    theirs.train(), ours.train()
    assert {n: p.requires_grad for n, p in ours.named_parameters()} == {
        n: p.requires_grad for n, p in theirs.named_parameters()
    }
    norms = [
        {n: m.training for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
        for model in (ours, theirs)
    ]
    assert norms[0] == norms[1]


@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.smoke
def test_old_plugin_positions(mmdet_resnet, depth):
    """A bottleneck takes mmdet's plugins as mmdet does; a basic block, which mmdet refuses, too."""
    plugin = dict(cfg=dict(type='ContextBlock', ratio=0.25), position='after_conv2')
    ours = randomise(StepResNet(depth, plugins=[plugin], norm_eval=False)).eval()
    x = picture()
    if depth == 50:
        theirs = mmdet_resnet(depth, plugins=[dict(plugin, stages=(True,) * 4)], norm_eval=False)
        theirs.eval()
        theirs.load_state_dict(ours.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(ours(x), theirs(x), strict=True))
    else:
        assert 'layer1.0.context_block.conv_mask.weight' in ours.state_dict()
        before = ours(x)[0]
        with torch.no_grad():
            ours.layer1[0].context_block.channel_add_conv[-1].bias += 1
        assert not torch.equal(ours(x)[0], before)


@pytest.mark.smoke
def test_deformable_convolutions(mmdet_resnet):
    options = dict(
        dcn=dict(type='DCNv2', deform_groups=1, fallback_on_stride=False),
        stage_with_dcn=(False, True, False, True),
        norm_eval=False,
        base_channels=8,
    )
    theirs = randomise(mmdet_resnet(50, **options))
    theirs.eval()
    ours = StepResNet(50, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = picture()
    assert all(torch.equal(a, b) for a, b in zip(ours(x), theirs(x), strict=True))


# Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize('depth', [18, 50])
def test_torchvisions_checkpoint_lacks_only_the_steps(depth):
    theirs = getattr(torchvision.models, f'resnet{depth}')().eval()
    ours = StepResNet(depth, plugins=[ADAPTOR])
    result = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert result.unexpected_keys == ['fc.weight', 'fc.bias']
    assert result.missing_keys
    assert all('.step.' in key for key in result.missing_keys)
    plain = StepResNet(depth).eval()
    plain.load_state_dict(theirs.state_dict(), strict=False)
    x = picture()
    layers = list(theirs.children())[:-2]
    assert torch.equal(nn.Sequential(*layers)(x), plain(x)[-1])


# Step sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize('depth', [18, 50, 101])
def test_step_sizes_on_every_block(depth):
    model = small(depth)
    widths = [8 * 2**i * model.block.expansion for i in range(4)]
    steps = [step.step_size.in_channels for step in model.steps().values()]
    assert steps == [w for w, n in zip(widths, BLOCKS[depth], strict=True) for _ in range(n)]
    extra = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in small(depth, plugins=()).parameters()
    )
    assert extra == 6 * sum(steps)


@pytest.mark.parametrize('depth, first_stage_first', [(18, True), (50, False)])
def test_identity_blocks(depth, first_stage_first):
    model = small(depth, plugins=[dict(ADAPTOR, blocks='identity')])
    chosen = [[block.step.step_size is not None for block in stage] for stage in model.stages]
    assert all(block.downsample is None for block in model.blocks() if block.step.step_size)
    assert [row[0] for row in chosen] == [first_stage_first, False, False, False]
    assert all(all(row[1:]) for row in chosen)


def test_stages_and_masks_choose_blocks():
    mask = [[True, False, False], [False] * 4, [True] * 6, [False, False, True]]
    plugin = dict(ADAPTOR, blocks=mask, stages=(True, True, False, True))
    model = small(50, plugins=[plugin])
    assert list(model.steps()) == ['layer1.0.step', 'layer4.2.step']


def test_two_step_sizes_on_different_blocks():
    current = dict(cfg=dict(type='mmstepnet.StepNetAdaptor', inputs='current'))
    model = small(
        18,
        plugins=[
            dict(ADAPTOR, stages=(True, False, False, False)),
            dict(current, stages=(False, True, True, True)),
        ],
    )
    inputs = [step.step_size.inputs for step in model.steps().values()]
    assert inputs == ['pair'] * 2 + ['current'] * 6


def test_the_block_takes_the_step_that_its_adaptor_says():
    model = randomise(small()).eval()
    block = model.layer2[0]
    x = torch.rand(2, 8, 8, 8)
    residual = block.norm2(block.conv2(block.norm1(block.conv1(x)).relu()))
    identity = block.downsample(x)
    dt = block.step.step_size(identity, residual)
    assert dt.std() > 0
    assert torch.allclose(block(x), (identity + residual * dt).relu(), rtol=0, atol=1e-6)


@pytest.mark.parametrize('inputs', ['pair', 'current', 'next', 'difference'])
def test_every_parameter_gets_a_gradient(inputs):
    plugin = dict(cfg=dict(type='mmstepnet.StepNetAdaptor', inputs=inputs))
    model = randomise(small(plugins=[plugin]))
    _, gradients, _ = run(model, picture())
    assert not [name for name, grad in gradients.items() if grad is None]
    assert not [n for n, g in gradients.items() if '.step_size.' in n and g.abs().max() == 0]


@pytest.mark.parametrize('depth', [18, 50])
def test_checkpointed_blocks_equal_plain_ones(depth):
    plain = randomise(small(depth))
    recomputed = small(depth, with_cp=True)
    recomputed.load_state_dict(plain.state_dict())
    x = picture()
    expected, got = run(plain, x), run(recomputed, x)
    assert all(torch.equal(a, b) for a, b in zip(expected[0], got[0], strict=True))
    for a, b in zip(expected[1:], got[1:], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-6, atol=1e-7, msg=key)


def test_recomputation_is_not_recorded():
    model = randomise(small(with_cp=True))
    heard = []
    for step in model.steps().values():
        step.recorder = lambda *args: heard.append(args[0])
    run(model, picture())
    assert heard == list(model.steps().values())


def test_one_picture_trains():
    model = randomise(small())
    _, gradients, buffers = run(model, picture(samples=1))
    assert all(torch.isfinite(grad).all() for grad in gradients.values())
    assert all(torch.isfinite(buffer).all() for buffer in buffers.values())


def test_bfloat16_autocast_trains():
    model = randomise(small())
    x = picture()
    expected = model(x)[-1]
    with torch.autocast('cpu', torch.bfloat16):
        outputs, gradients, _ = run(model, x)
    # Norms over two samples make gradients of a whole network in bfloat16 as good as random: that
    # they are right is tested a step at a time (test_fused_step.py).
    assert all(torch.isfinite(grad).all() and grad.any() for grad in gradients.values())
    # bfloat16 keeps 8 bits; 20 layers of them lose a few per cent.
    assert (outputs[-1] - expected).norm() < 0.1 * expected.norm()


# Initialisation ---------------------------------------------------------------------------------


@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('zero_init', [True, False])
def test_init_weights(depth, zero_init):
    model = StepResNet(depth, plugins=[ADAPTOR], zero_init_residual=zero_init, norm_eval=False)
    model.init_weights()
    for block in model.blocks():
        assert block.last_norm.weight.unique().tolist() == [0.0 if zero_init else 1.0]
        assert block.norm1.weight.unique().tolist() == [1.0]
        # Kaiming with fan_out: the variance of n weights deviates by about sqrt(2 / n).
        weight = block.conv1.weight
        fan_out = weight.shape[0] * weight[0, 0].numel()
        assert weight.var().item() == pytest.approx(
            2 / fan_out, rel=5 * (2 / weight.numel()) ** 0.5
        )
        adaptor = block.step.step_size
        assert adaptor.scale.unique().tolist() == [0.0]
        assert adaptor.shift.unique().tolist() == [-1.0]
        assert 0.6 < adaptor.weight.abs().max() <= 2**-0.5


def test_an_enclosing_kaiming_pass_leaves_the_adaptors_alone():
    """mmpretrain's classifiers initialise their children's layers with a pass of their own."""
    classifier_cls = pytest.importorskip('mmpretrain.models').ImageClassifier
    init_default_scope('mmpretrain')
    classifier = classifier_cls(
        backbone=dict(type='mmstepnet.StepResNet', depth=18, plugins=[ADAPTOR], norm_eval=False),
        neck=dict(type='GlobalAveragePooling'),
        head=dict(type='LinearClsHead', num_classes=10, in_channels=512),
        init_cfg=[dict(type='Kaiming', layer=['Conv2d', 'Linear'])],
    )
    classifier.init_weights()
    for step in classifier.backbone.steps().values():
        assert step.step_size.norm.weight.unique().tolist() == [1.0]
        assert step.step_size.shift.unique().tolist() == [-1.0]
    assert classifier(picture()).shape == (2, 10)


# Fresh step sizes under freezing ----------------------------------------------------------------


def frozen(init_cfg=None):
    return small(frozen_stages=1, norm_eval=True, init_cfg=init_cfg)


def is_trained(step):
    trained = {p.requires_grad for p in step.parameters()}
    assert len(trained) == 1
    return trained.pop()


def test_fresh_step_sizes_are_exempt_from_freezing():
    model = frozen()
    model.init_weights()
    model.train()
    for name, step in model.steps().items():
        assert is_trained(step), name
        assert step.step_size.norm.training, name
    assert not any(p.requires_grad for p in model.layer1[0].conv1.parameters())
    assert not model.layer3[0].norm1.training
    _, gradients, _ = run(model, picture())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, grad in gradients.items() if grad is not None} == trained


@pytest.mark.smoke
def test_fresh_step_sizes_move_under_the_stock_schedule(tmp_path):
    path = str(tmp_path / 'trunk.pth')
    torch.save(randomise(small(plugins=())).state_dict(), path)
    model = frozen(dict(type='Pretrained', checkpoint=path))
    model.init_weights()
    model.double().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        run(model, picture().double())
        optimizer.step()
    for name, step in model.steps().items():
        for key in step.state_dict():
            assert not torch.equal(before[f'{name}.{key}'], step.state_dict()[key]), (name, key)
    stem = {k for k in before if k.startswith(('conv1', 'bn1')) or ('.bn' in k and 'running' in k)}
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in stem)


@pytest.mark.parametrize('how', ['pretrained', 'pretrained with prefix', 'load_state_dict'])
@pytest.mark.smoke
def test_loaded_step_sizes_freeze_with_their_stage(tmp_path, how):
    state = randomise(small()).state_dict()
    if how == 'load_state_dict':
        model = frozen()
        model.load_state_dict(state)
    else:
        prefix = 'backbone.' if 'prefix' in how else ''
        path = str(tmp_path / 'trained.pth')
        torch.save(dict(state_dict={prefix + key: value for key, value in state.items()}), path)
        init_cfg = dict(type='Pretrained', checkpoint=path)
        if prefix:
            init_cfg['prefix'] = prefix
        model = frozen(init_cfg)
        # DistributedDataParallel wraps the model here, before init_weights.
        assert not is_trained(model.layer1[0].step)
        model.init_weights()
    model.train()
    assert not model.fresh_steps()
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    for name, step in model.steps().items():
        assert is_trained(step) == (not name.startswith('layer1'))
        assert not step.step_size.norm.training


def test_resuming_leaves_fresh_step_sizes_exempt():
    """A resumed run initialises first and then loads its own weights, step sizes among them."""
    first = frozen()
    first.init_weights()
    resumed = frozen()
    resumed.init_weights()
    resumed.load_state_dict(first.state_dict())
    resumed.train()
    assert all(is_trained(step) for step in resumed.steps().values())
    assert all(step.step_size.norm.training for step in resumed.steps().values())


# Deployment -------------------------------------------------------------------------------------


def test_deployed_backbone_equals_the_trained_one():
    model = randomise(small())
    x = picture()
    with pytest.raises(RuntimeError, match='call eval'):
        model.train().switch_to_deploy()
    expected = model.eval()(x)
    for _ in range(2):
        model.switch_to_deploy()
        for got, want in zip(model(x), expected, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()
    assert not [key for key in model.state_dict() if '.step_size.norm' in key]


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(depth=19), 'depth must be one of 18, 34, 50, 101, 152, got 19'),
        (dict(depth='50'), "depth must be one of .* got '50'"),
        (dict(depth=[18]), r'depth must be one of .* got \[18\]'),
        (dict(num_stages=5), 'num_stages must be 1 to 4, got 5'),
        (dict(strides=(1, 2)), 'strides needs one entry for each of 4 stages'),
        (dict(out_indices=(4,)), r'out_indices must lie in 0\.\.3'),
        (dict(style='tensorflow'), "style must be 'pytorch' or 'caffe'"),
        (dict(frozen_stages=5), r'frozen_stages must lie in -1\.\.4, got 5'),
        (dict(pretrained='x', init_cfg=dict(type='Kaiming')), 'cannot both be given'),
        (dict(dcn=dict(type='DCN'), stage_with_dcn=(True,) * 4), 'dcn needs bottleneck blocks'),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        StepResNet(**(dict(depth=18) | kwargs))


@pytest.mark.parametrize(
    'plugin, message',
    [
        (dict(position='after_conv3'), 'position must be one of .*residual_step, got'),
        (dict(position='before_sum'), "position must be one of .* got 'before_sum'"),
        (dict(stages=(True,) * 5), 'stages needs 4 entries, one a stage, got 5'),
        (dict(stages=(True,) * 3), 'stages needs 4 entries, one a stage, got 3'),
        (dict(stages='all'), "stages must be a tuple of bools, one a stage, got 'all'"),
        (dict(stages=(1, 2, 0, 0)), 'stages must be a tuple of bools'),
        (dict(blocks='some'), "blocks must be 'all', 'identity' or a list of lists of bools"),
        (dict(blocks=[[True] * 2] * 3), 'blocks has .* entries by stage'),
        (dict(blocks=[[True] * 3] + [[True] * 2] * 3), r'blocks has \[3, 2, 2, 2\] entries'),
        (dict(blocks=[True] * 8), "blocks must be 'all', 'identity' or a list of lists"),
        (dict(blocks=None), "blocks must be 'all', 'identity' or a list of lists"),
        (dict(place='end'), "unknown key 'place'"),
        (dict(cfg='mmstepnet.ECA'), 'each must be a dict'),
        (dict(cfg=dict(inputs='pair')), 'cfg needs a type'),
        (dict(cfg=dict(type='mmstepnet.StepNetAdaptor', inputs='x')), 'inputs must be one of'),
    ],
)
def test_bad_plugins(plugin, message):
    with pytest.raises(ValueError, match=message):
        StepResNet(18, plugins=[ADAPTOR | plugin])


def test_two_step_sizes_on_one_block_are_refused():
    with pytest.raises(ValueError, match='a block takes one'):
        StepResNet(18, plugins=[ADAPTOR, ADAPTOR])


def test_bad_position_names_every_allowed_one():
    with pytest.raises(ValueError, match='after_conv1, after_conv2, after_conv3, residual_step'):
        StepResNet(50, plugins=[dict(ADAPTOR, position='end')])


def test_config_objects_are_plugins_too():
    cfg = Config(dict(plugins=[dict(ADAPTOR, blocks=[[True, False]] * 4)]))
    model = small(plugins=cfg.plugins)
    assert len(model.steps()) == 4
    assert isinstance(model.layer1[0].step, ResidualStep)
    assert isinstance(model.layer1[0].step.step_size, StepNetAdaptor)


@pytest.mark.parametrize(
    'other',
    [dict(type='mmstepnet.SqueezeExcitation', reduction=4), dict(ADAPTOR['cfg'], inputs='next')],
)
def test_weights_of_another_step_size_leave_this_one_fresh(tmp_path, other):
    path = tmp_path / 'other.pth'
    torch.save(dict(state_dict=small(plugins=[dict(cfg=other)]).state_dict()), path)
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model = small(norm_eval=True, frozen_stages=1, init_cfg=init_cfg)
    model.init_weights()
    model.train()
    assert len(model.fresh_steps()) == 8
    for step in model.steps().values():
        assert step.step_size.norm.training
        assert all(parameter.requires_grad for parameter in step.parameters())


def test_weights_are_initialised_once():
    model = small(zero_init_residual=True)
    model.init_weights()
    randomise(model)
    before = copy.deepcopy(model.state_dict())
    model.init_weights()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_weights_that_come_too_late_for_distributed_training_are_refused(tmp_path, monkeypatch):
    path = tmp_path / 'late.pth'
    model = small(frozen_stages=1, init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    torch.save(randomise(small()).state_dict(), path)
    monkeypatch.setattr('mmstepnet.models.backbones.base.get_world_size', lambda: 2)
    with pytest.raises(RuntimeError, match='known too late for distributed training'):
        model.init_weights()
