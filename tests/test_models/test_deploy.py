"""Deployment: equal outputs, idempotent, refused in training mode."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmstepnet.models import StepResNet, StepResNetCifar, switch_to_deploy
from mmstepnet.models.layers import ResidualStep
from mmstepnet.models.step_sizes import StepNetAdaptor

STEP_SIZES = ('StepNetAdaptor', 'SqueezeExcitation', 'CBAM', 'SRM', 'DIA')


def randomise(model):
    """Weights and statistics as of a trained model: none at a special value."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 2)
    for name, parameter in model.named_parameters():
        if '.step_size.s' in name:
            nn.init.normal_(parameter)
    return model.eval()


def plugin(step_size):
    return [dict(cfg=dict(type=f'mmstepnet.{step_size}'))]


def norms(model):
    """Batch norms over maps that are left."""
    return [m for m in model.modules() if type(m) is nn.BatchNorm2d]


def equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize('step_size', STEP_SIZES)
def test_backbone(step_size):
    model = randomise(StepResNet(18, base_channels=16, plugins=plugin(step_size)))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want = model(x)
        assert switch_to_deploy(model) is model
        keys = set(model.state_dict())
        equal(model(x), want)
        assert not norms(model)
        state = copy.deepcopy(model.state_dict())
        switch_to_deploy(model)
    assert set(state) == keys
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    'make',
    [
        lambda p: StepResNet(50, base_channels=16, deep_stem=True, avg_down=True, plugins=p),
        lambda p: StepResNetCifar(20, block='basic', plugins=p),
        lambda p: StepResNetCifar(29, pre_activation=True, plugins=p),
    ],
    ids=['deep stem', 'cifar', 'pre-activated'],
)
def test_other_trunks(make):
    model = randomise(make(plugin('StepNetAdaptor')))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = model(x)
        before = len(norms(model))
        equal(switch_to_deploy(model)(x), want)
    assert len(norms(model)) < before / 2


def test_plugin_layers_between_convolution_and_norm_stay_right():
    gate = dict(cfg=dict(type='mmstepnet.ECA'), position='after_conv1')
    model = randomise(StepResNetCifar(29, pre_activation=True, plugins=[gate]))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = model(x)
        equal(switch_to_deploy(model)(x), want)


def test_gradients_flow_through_a_deployed_trunk():
    model = randomise(StepResNet(18, base_channels=16, plugins=plugin('StepNetAdaptor')))
    x = torch.randn(1, 3, 32, 32, requires_grad=True)
    want = torch.autograd.grad(model(x)[-1].sum(), x)[0]
    got = torch.autograd.grad(switch_to_deploy(model)(x)[-1].sum(), x)[0]
    assert (got - want).norm() <= 1e-4 * want.norm()


def test_training_mode_is_refused_wherever_it_is():
    model = StepResNet(18, base_channels=16, plugins=plugin('StepNetAdaptor')).eval()
    model.layer3[0].norm1.train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r'call eval\(\) first'):
        switch_to_deploy(model)
    assert set(before) == set(model.state_dict())


def test_adaptors_in_a_model_of_any_kind():
    step = ResidualStep(StepNetAdaptor(4)).eval()
    for parameter in step.parameters():
        nn.init.normal_(parameter)
    identity, residual = torch.randn(2, 2, 4, 3, 3)
    with torch.no_grad():
        want = step(identity, residual)
        switch_to_deploy(nn.ModuleList([step]).eval())
        torch.testing.assert_close(step(identity, residual), want)
    assert not list(step.parameters())


@pytest.mark.parametrize('part', ['conv2', 'bn2', 'step', 'step.step_size'])
@pytest.mark.parametrize('deployed', [False, True])
def test_hooks_keep_what_they_were_given(part, deployed):
    """Where maps are overwritten, a hook that holds one must not see it change."""
    model = randomise(StepResNet(18, base_channels=16, plugins=plugin('StepNetAdaptor')))
    if deployed:
        switch_to_deploy(model)
    held = []

    def hold(module, args, output=None):
        held.extend((x, x.clone()) for x in (*args, output) if isinstance(x, torch.Tensor))

    module = model.layer2[1].get_submodule(part)
    module.register_forward_pre_hook(hold)
    module.register_forward_hook(hold)
    with torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    assert len(held) >= 3
    assert all(torch.equal(x, copied) for x, copied in held)


class SharedConvolution(nn.Module):
    """One convolution with a norm for each level, as some detection heads have it."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(4, 4, 3, padding=1)
        self.levels = nn.ModuleList(nn.Sequential(conv, nn.BatchNorm2d(4)) for _ in range(2))

    def forward(self, x):
        return [level(x) for level in self.levels]


def test_shared_convolutions_keep_their_norms():
    head = randomise(SharedConvolution())
    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        want = head(x)
        equal(switch_to_deploy(head)(x), want)


@pytest.mark.parametrize(
    'conv_cfg, order',
    [(dict(type='ConvWS'), ('conv', 'norm', 'act')), (None, ('norm', 'conv', 'act'))],
)
def test_convolutions_that_are_not_folded_rightly_keep_their_norms(conv_cfg, order):
    neck = ConvModule(4, 4, 3, conv_cfg=conv_cfg, norm_cfg=dict(type='BN'), order=order)
    backbone = StepResNet(18, base_channels=8, conv_cfg=conv_cfg)
    model = randomise(nn.ModuleList([backbone, neck]))
    x, y = torch.randn(2, 3, 64, 64), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        want = [*backbone(x), neck(y)]
        switch_to_deploy(model)
        equal([*model[0](x), model[1](y)], want)


@pytest.fixture
def classifier():
    pytest.importorskip('mmpretrain')
    init_default_scope('mmpretrain')
    backbone = dict(
        type='mmstepnet.StepResNetCifar',
        depth=20,
        block='basic',
        plugins=plugin('StepNetAdaptor'),
    )
    neck = dict(type='GlobalAveragePooling')
    head = dict(type='LinearClsHead', num_classes=10, in_channels=64)
    return randomise(
        MODELS.build(
            dict(type='mmpretrain.ImageClassifier', backbone=backbone, neck=neck, head=head)
        )
    )


@pytest.mark.smoke
def test_classifier(classifier):
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = classifier(x)
        got = switch_to_deploy(classifier)(x)
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert not norms(classifier)


@pytest.mark.smoke
def test_detector():
    pytest.importorskip('mmdet.models')
    init_default_scope('mmdet')
    backbone = dict(
        type='mmstepnet.StepResNet', depth=18, base_channels=8, plugins=plugin('StepNetAdaptor')
    )
    neck = dict(
        type='FPN',
        in_channels=[8, 16, 32, 64],
        out_channels=16,
        num_outs=5,
        norm_cfg=dict(type='BN'),
    )
    head = dict(
        type='RetinaSepBNHead',
        num_classes=3,
        num_ins=5,
        in_channels=16,
        feat_channels=16,
        stacked_convs=1,
        norm_cfg=dict(type='BN'),
    )
    model = MODELS.build(dict(type='mmdet.RetinaNet', backbone=backbone, neck=neck, bbox_head=head))
    model.init_weights()
    randomise(model)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want = [map for level in model(x) for map in level]
        got = [map for level in switch_to_deploy(model)(x) for map in level]
    equal(got, want)
    assert not norms(model.backbone) and not norms(model.neck)
    # Its convolutions serve all levels.
    assert norms(model.bbox_head)
