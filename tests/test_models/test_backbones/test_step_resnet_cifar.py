import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import init_default_scope
from torch import nn

from mmstepnet.models import StepNetAdaptor, StepResNetCifar
from mmstepnet.registry import MODELS

STEPNET = dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))


def _count(num_classes=10, **kwargs):
    """Parameters of the network with its linear layer."""
    net = StepResNetCifar(**kwargs)
    return sum(p.numel() for p in net.parameters()) + (net.feat_dim + 1) * num_classes


def _plugins(name, **arguments):
    return [dict(cfg=dict(type=f'mmstepnet.{name}', **arguments))]


def test_parameters_of_resnet164():
    assert _count(10) == 1_704_154
    assert _count(100) == 1_727_284
    assert _count(10, pre_activation=True) == 1_703_258


@pytest.mark.parametrize(
    ('plugins', 'added'),
    [
        (_plugins('SqueezeExcitation'), 202_104),
        (_plugins('ECA'), 234),
        (_plugins('CBAM'), 207_504),
        (_plugins('SRM'), 32_256),
        (_plugins('FCA'), 202_104),
        (_plugins('FCA', bias=False), 193_536),
        (_plugins('SGE'), 6_912),
        (_plugins('SEM'), 242_820),
        (_plugins('IE'), 16_128),
        (_plugins('DIA'), 218_848),
    ],
    ids=lambda value: value[0]['cfg']['type'] if isinstance(value, list) else '',
)
def test_parameters_that_a_step_size_adds_to_resnet164(plugins, added):
    assert _count(plugins=plugins) - 1_704_154 == added


def test_parameters_that_iebn_adds_to_resnet164():
    assert _count(norm_cfg=dict(type='mmstepnet.IEBN')) - 1_704_154 == 24_224


@pytest.mark.parametrize(
    ('method', 'printed'),
    [
        (dict(), (1.70, 1.73)),
        (dict(plugins=_plugins('SqueezeExcitation')), (1.91, 1.93)),
        (dict(plugins=_plugins('ECA')), (1.70, 1.73)),
        (dict(plugins=_plugins('SEM')), (1.95, 1.97)),
        (dict(plugins=_plugins('SRM')), (1.74, 1.76)),
        (dict(plugins=_plugins('FCA')), (1.91, 1.93)),
        (dict(norm_cfg=dict(type='mmstepnet.IEBN')), (1.73, 1.75)),
        (dict(plugins=[dict(STEPNET, blocks='identity')]), (1.75, 1.77)),
    ],
    ids=['org', 'se', 'eca', 'sem', 'srm', 'fca', 'iebn', 'stepnet'],
)
def test_millions_of_parameters_as_the_paper_prints_them(method, printed):
    assert tuple(round(_count(n, **method) / 1e6, 2) for n in (10, 100)) == printed


@pytest.mark.parametrize(
    ('depth', 'block', 'millions'),
    [(20, 'basic', 0.27), (32, 'basic', 0.46), (44, 'basic', 0.66), (56, 'basic', 0.85)],
)
def test_parameters_of_the_original_family_with_padded_shortcuts(depth, block, millions):
    assert round(_count(depth=depth, block=block, shortcut='pad') / 1e6, 2) == millions


@pytest.mark.slow
@pytest.mark.parametrize(('depth', 'block'), [(110, 'basic'), (1001, 'bottleneck')])
def test_deep_ones_run(depth, block):
    net = StepResNetCifar(depth, block=block)
    assert sum(1 for _ in net.blocks()) == (depth - 2) // (2 if block == 'basic' else 3)
    net(torch.rand(2, 3, 8, 8))[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def _batch_norm(x, norm):
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def _randomise_norms(net):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 1.5)


@pytest.mark.parametrize('shortcut', ['projection', 'pad'])
def test_post_activated_bottleneck_equals_a_plain_forward(shortcut):
    net = StepResNetCifar(11, shortcut=shortcut, widths=(4, 6, 9)).double().eval()
    _randomise_norms(net)
    picture = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    x = _batch_norm(F.conv2d(picture, net.conv1.weight, padding=1), net.bn1).relu()
    for stride, layer in zip((1, 2, 2), (net.layer1, net.layer2, net.layer3), strict=True):
        (block,) = layer
        y = _batch_norm(F.conv2d(x, block.conv1.weight), block.bn1).relu()
        y = F.conv2d(y, block.conv2.weight, stride=stride, padding=1)
        y = F.conv2d(_batch_norm(y, block.bn2).relu(), block.conv3.weight)
        y = _batch_norm(y, block.bn3)
        if shortcut == 'projection':
            conv, norm = block.downsample
            identity = _batch_norm(F.conv2d(x, conv.weight, stride=stride), norm)
        else:
            before = (y.shape[1] - x.shape[1]) // 2
            identity = torch.zeros_like(y)
            identity[:, before : before + x.shape[1]] = x[:, :, ::stride, ::stride]
        x = (identity + y).relu()
    torch.testing.assert_close(net(picture)[0], x)


def test_pre_activated_basic_block_equals_a_plain_forward():
    net = StepResNetCifar(14, block='basic', pre_activation=True, widths=(4, 6, 8)).double().eval()
    _randomise_norms(net)
    picture = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    x = F.conv2d(picture, net.conv1.weight, padding=1)
    for stride, layer in zip((1, 2, 2), (net.layer1, net.layer2, net.layer3), strict=True):
        for j, block in enumerate(layer):
            first_stride = stride if j == 0 else 1
            activated = _batch_norm(x, block.bn1).relu()
            y = F.conv2d(activated, block.conv1.weight, stride=first_stride, padding=1)
            y = F.conv2d(_batch_norm(y, block.bn2).relu(), block.conv2.weight, padding=1)
            if block.downsample is not None:
                x = F.conv2d(activated, block.downsample[0].weight, stride=first_stride)
            x = x + y
    torch.testing.assert_close(net(picture)[0], _batch_norm(x, net.norm1).relu())


@pytest.mark.parametrize('pre_activation', [False, True])
def test_the_step_size_scales_the_residual(pre_activation):
    net = StepResNetCifar(20, pre_activation=pre_activation, plugins=[STEPNET], widths=(4, 4, 4))
    net.eval()
    recorded = {}

    def recorder(step, identity, residual, dt):
        recorded[step] = identity.clone(), residual.clone(), dt.clone()

    inputs = {}
    for block in net.blocks():
        block.step.recorder = recorder
        nn.init.normal_(block.step.step_size.scale)
        block.step.register_forward_hook(lambda m, args, out: inputs.update({m: out.clone()}))
    net(torch.rand(1, 3, 8, 8))
    assert len(recorded) == 6
    for step, (identity, residual, dt) in recorded.items():
        torch.testing.assert_close(dt, step.step_size(identity, residual))
        expected = identity + residual * dt
        torch.testing.assert_close(inputs[step], expected if pre_activation else expected.relu())


@pytest.mark.parametrize(
    ('block', 'depth', 'blocks', 'expected'),
    [
        ('bottleneck', 20, 'all', [[1, 1], [1, 1], [1, 1]]),
        ('bottleneck', 20, 'identity', [[0, 1], [0, 1], [0, 1]]),
        # A basic block of the first stage changes nothing: its shortcut is the identity.
        ('basic', 14, 'identity', [[1, 1], [0, 1], [0, 1]]),
        ('basic', 14, [[1, 0], [0, 0], [0, 1]], [[1, 0], [0, 0], [0, 1]]),
    ],
)
def test_which_blocks_get_a_step_size(block, depth, blocks, expected):
    net = StepResNetCifar(depth, block=block, plugins=[dict(STEPNET, blocks=blocks)])
    actual = [[b.step.step_size is not None for b in stage] for stage in net.stages]
    assert actual == [[bool(flag) for flag in row] for row in expected]


def test_resnet164_has_51_blocks_with_an_identity_shortcut():
    net = StepResNetCifar(164, plugins=[dict(STEPNET, blocks='identity')])
    assert len(net.steps()) == 51


@pytest.mark.parametrize('map_size', [32, 96])
def test_fca_takes_the_maps_of_the_training_resolution(map_size):
    net = StepResNetCifar(11, plugins=_plugins('FCA'), map_size=map_size)
    sizes = [stage[0].step.step_size.dct_size for stage in net.stages]
    assert sizes == [map_size, map_size // 2, map_size // 4]


def test_init_weights_is_kaiming_for_convolutions_and_leaves_step_sizes_at_their_start():
    net = StepResNetCifar(20, plugins=_plugins('CBAM'))
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(7.0)
    net.init_weights()
    fan_out = 64 * 9
    std = net.layer3[1].conv2.weight.std().item()
    assert std == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    for block in net.blocks():
        assert torch.equal(block.bn3.weight, torch.ones_like(block.bn3.weight))
        bound = 1 / (2 * 49) ** 0.5
        assert block.step.step_size.conv.weight.abs().max() <= bound
    adaptor_net = StepResNetCifar(20, plugins=[STEPNET])
    adaptor_net.init_weights()
    for module in adaptor_net.modules():
        if isinstance(module, StepNetAdaptor):
            assert torch.all(module.shift == -1)
            assert torch.all(module.scale == 0)


def test_zero_init_residual_sets_the_norm_before_the_sum():
    net = StepResNetCifar(14, block='basic', zero_init_residual=True)
    net.init_weights()
    assert all(torch.all(block.bn2.weight == 0) for block in net.blocks())


def test_checkpointing_equals_plain():
    x = torch.rand(2, 3, 8, 8)
    results = []
    for with_cp in (False, True):
        torch.manual_seed(1)
        net = StepResNetCifar(
            14,
            block='basic',
            pre_activation=True,
            plugins=[STEPNET],
            widths=(4, 8, 8),
            with_cp=with_cp,
        )
        net(x)[0].square().sum().backward()
        results.append((net.state_dict(), [p.grad for p in net.parameters()]))
    torch.testing.assert_close(results[0], results[1])


def test_serves_an_mmpretrain_classifier():
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    model = MODELS.build(
        dict(
            type='mmpretrain.ImageClassifier',
            backbone=dict(type='mmstepnet.StepResNetCifar', depth=11, plugins=[STEPNET]),
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=5, in_channels=256),
        )
    )
    model.init_weights()
    model.eval()
    x = torch.rand(2, 3, 32, 32)
    features = model.backbone(x)[0].mean((2, 3))
    torch.testing.assert_close(model(x), model.head.fc(features))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(depth=20, block='wide'), "block must be 'bottleneck' or 'basic', got 'wide'"),
        (dict(depth=165), r'depth must be 9n \+ 2 with n >= 1 .*\(11, 20, 29, ...\), got 165'),
        (dict(depth=21, block='basic'), r'depth must be 6n \+ 2 .*\(8, 14, 20, ...\), got 21'),
        (dict(depth=2), 'depth must be'),
        (dict(depth=164.0), 'depth must be'),
        (dict(widths=(16, 32)), r'widths must be three positive ints, got \(16, 32\)'),
        (dict(shortcut='A'), "shortcut must be 'projection' or 'pad', got 'A'"),
        (dict(depth=11, shortcut='pad', widths=(16, 8, 2)), 'give widths that do not shrink'),
        (dict(out_indices=(3,)), r'out_indices must lie in 0..2, got \(3,\)'),
        (dict(frozen_stages=4), 'frozen_stages must lie in -1..3, got 4'),
        (
            dict(pre_activation=True, zero_init_residual=True),
            'zero_init_residual=True needs a norm',
        ),
        (dict(plugins=[dict(STEPNET, stages=(True,) * 4)]), 'stages needs 3 entries'),
        (dict(plugins=[dict(STEPNET, position='after_conv4')]), 'position must be one of'),
        (dict(depth=11, plugins=_plugins('SGE', groups=48)), 'groups=48 does not divide'),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StepResNetCifar(**arguments)
