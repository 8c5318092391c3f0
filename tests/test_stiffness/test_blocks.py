"""The recorder on networks that are not the package's own."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from mmstepnet.models.backbones import StepResNet
from mmstepnet.stiffness import TrajectoryRecorder, neural_stiffness_index


def randomise(model):
    """Norms as in a trained network; libraries start the last one of a block at zero."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


@torch.no_grad()
def record(model, images, **kwargs):
    model.eval()
    with TrajectoryRecorder(model, **kwargs) as result:
        model(images)
    return result


def resnet(library, depth):
    if library == 'torchvision':
        from torchvision import models

        return getattr(models, f'resnet{depth}')(weights=None)
    if library == 'timm':
        return pytest.importorskip('timm').create_model(f'resnet{depth}')
    if library == 'mmpretrain':
        return pytest.importorskip('mmpretrain.models.backbones').ResNet(depth)
    return pytest.importorskip('mmdet.models.backbones').ResNet(depth)


@pytest.mark.parametrize('library', ['torchvision', 'timm', 'mmpretrain', 'mmdet'])
@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('step', ['attention', 'unit'])
@pytest.mark.smoke
def test_the_same_weights_give_the_same_numbers_in_every_library(library, depth, step):
    ours, theirs = randomise(StepResNet(depth)), resnet(library, depth)
    missing = theirs.load_state_dict(ours.state_dict(), strict=False).missing_keys
    assert missing in ([], ['fc.weight', 'fc.bias'])
    images = torch.randn(2, 3, 32, 32)
    expected, result = record(ours, images, step=step), record(theirs, images, step=step)
    assert result.names == expected.names
    assert torch.equal(result.stages, expected.stages)
    assert torch.equal(result.nsi, expected.nsi)
    assert torch.equal(result.dt, torch.ones_like(result.nsi))


def test_torchvision_block_by_hand():
    from torchvision import models

    model, images = randomise(models.resnet18()), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        x = model.maxpool(model.relu(model.bn1(model.conv1(images))))
        block = model.layer2[0]
        x = model.layer1(x)
        f = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
        expected = neural_stiffness_index(block.downsample(x), f)
    result = record(model, images, exclude_first=False)
    column = result.names.index('layer2.0')
    torch.testing.assert_close(result.nsi[:, column], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    'name, size, blocks, stages',
    [
        ('vit_tiny_patch16_224', 224, 'blocks', [12]),
        ('swin_tiny_patch4_window7_224', 224, 'layers.{}.blocks', [2, 2, 6, 2]),
        ('convnext_atto', 64, 'stages.{}.blocks', [2, 2, 6, 2]),
        ('resnetv2_50', 64, 'stages.{}.blocks', [3, 4, 6, 3]),
    ],
)
def test_timm_output_minus_input(name, size, blocks, stages):
    timm = pytest.importorskip('timm')
    model = timm.create_model(name).eval()
    for parameter in model.parameters():  # layer scale hides the branches of an untrained ConvNeXt
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    images = torch.randn(2, 3, size, size)
    heard = {}
    for stage in range(len(stages)):
        for number in range(1, stages[stage]):
            key = f'{blocks.format(stage)}.{number}'
            model.get_submodule(key).register_forward_hook(
                lambda m, args, out, k=key: heard.update({k: (args[0].double(), out.double())})
            )
    result = record(model, images)
    assert result.names == list(heard)
    assert result.stages.tolist() == [s for s, n in enumerate(stages) for _ in range(n - 1)]
    for column, (x, out) in enumerate(heard.values()):
        expected = (out - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        torch.testing.assert_close(result.nsi[:, column], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    'name, names',
    [
        ('swin_t', ['features.1.1', 'features.3.1']),
        ('vit_b_16', ['encoder.layers.encoder_layer_1', 'encoder.layers.encoder_layer_2']),
        ('convnext_tiny', ['features.1.1', 'features.1.2']),
    ],
)
def test_torchvision_blocks_are_found(name, names):
    from torchvision import models

    assert TrajectoryRecorder(getattr(models, name)()).names[:2] == names


@pytest.mark.parametrize(
    'name, kwargs, names',
    [
        ('VisionTransformer', dict(arch='deit-t'), ['layers.1', 'layers.2']),
        ('SwinTransformer', dict(arch='tiny'), ['stages.0.blocks.1', 'stages.1.blocks.1']),
        ('ConvNeXt', dict(arch='atto'), ['stages.0.1', 'stages.1.1']),
    ],
)
@pytest.mark.smoke
def test_mmpretrain_blocks_are_found(name, kwargs, names):
    backbones = pytest.importorskip('mmpretrain.models.backbones')
    assert TrajectoryRecorder(getattr(backbones, name)(**kwargs)).names[:2] == names


@pytest.mark.parametrize('step', ['attention', 'unit'])
def test_attention_of_others_counts_as_ours_does(step):
    """timm's and MMPretrain's SE-ResNets equal StepResNet with SE of the same weights."""
    timm = pytest.importorskip('timm')
    se = partial(timm.layers.SEModule, rd_divisor=1)
    theirs = randomise(timm.create_model('seresnet18', block_args=dict(attn_layer=se)))
    plugins = [
        dict(cfg=dict(type='mmstepnet.SqueezeExcitation'), blocks='all', position='residual_step')
    ]
    ours = StepResNet(18, plugins=plugins).eval()
    weights = {k: v for k, v in theirs.state_dict().items() if not k.startswith('fc')}
    gates = [weights.pop(key) for key in list(weights) if '.se.' in key]
    own = {key: value for key, value in ours.state_dict().items() if '.step.' in key}
    for (key, value), gate in zip(own.items(), gates, strict=True):
        weights[key] = gate.reshape(value.shape)
    ours.load_state_dict(weights)
    images = torch.randn(2, 3, 32, 32)
    expected, result = record(ours, images, step=step), record(theirs, images, step=step)
    torch.testing.assert_close(result.nsi, expected.nsi, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.dt, expected.dt, rtol=1e-5, atol=0)
    assert result.dt.max() < 0.9


class PreActBlock(nn.Module):
    """Written as in many scripts: no shortcut attribute where the input passes unchanged."""

    def __init__(self, width_in, width):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width_in), nn.Conv2d(width_in, width, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        if width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1)

    def forward(self, x):
        out = self.bn1(x).relu()
        identity = self.shortcut(out) if hasattr(self, 'shortcut') else x
        return self.conv2(self.bn2(self.conv1(out)).relu()) + identity


def test_pre_activation_blocks_of_a_script():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(PreActBlock(4, 8), PreActBlock(8, 8)))
    model.eval()
    images = torch.randn(2, 3, 8, 8)
    result = record(model, images, exclude_first=False)
    assert result.names == ['1.0', '1.1'] and result.stages.tolist() == [0, 0]
    with torch.no_grad():
        x = model[0](images)
        first, second = model[1]
        identity = first.shortcut(first.bn1(x).relu())
        y = first(x)
        expected = [
            neural_stiffness_index(identity.double(), y.double() - identity.double()),
            neural_stiffness_index(y.double(), second(y).double() - y.double()),
        ]
    torch.testing.assert_close(result.nsi, torch.stack(expected, 1), rtol=1e-12, atol=0)


class Scaled(nn.Module):
    """Looks like He et al.'s block, but halves the branch on its way to the sum."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential()

    def forward(self, x):
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (self.shortcut(x) + branch / 2).relu()


def test_a_block_that_only_looks_right_is_refused():
    model = nn.Sequential(Scaled(), Scaled())
    with pytest.raises(ValueError, match=r'block 1 does not return activation'):
        record(model, torch.randn(2, 4, 5, 5))


class Inplace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize(
    'block, message',
    [(Inplace(), 'in place'), (nn.Conv2d(3, 4, 1), 'no residual block'), (nn.Flatten(), 'shape')],
)
def test_named_modules_that_are_no_blocks(block, message):
    model = nn.Sequential(nn.Identity(), block)
    with pytest.raises(ValueError, match=f'block 1 .*{message}'):
        record(model, torch.randn(2, 3, 4, 4), blocks=['1'], exclude_first=False)


def test_ways_to_name_blocks():
    model = StepResNet(18)
    expected = [f'layer{i}.{j}' for i in range(1, 5) for j in range(2)]
    for blocks in ('layer*.*', re.compile(r'layer\d\.\d'), expected, 'layer[1-4].[01]'):
        recorder = TrajectoryRecorder(model, blocks=blocks, exclude_first=False)
        assert recorder.names == expected
        assert recorder.stages.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    recorder = TrajectoryRecorder(model, blocks=[expected[:3], expected[3:]])
    assert recorder.names == expected[1:3] + expected[4:]
    assert recorder.stages.tolist() == [0, 0, 1, 1, 1, 1]
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(
        record(model, images, blocks='layer3.*').nsi, record(model, images).nsi[:, 2:3]
    )


@pytest.mark.parametrize(
    'blocks, error, message',
    [
        ('stage*.*', ValueError, r'matches no module.*8 x BasicBlock: layer1\.0 ... layer4\.1'),
        (['layer1.0', 'layer9.9'], ValueError, r"\['layer9\.9'\], not in the model"),
        ([], TypeError, 'blocks must be'),
        (3, TypeError, 'blocks must be'),
        (['layer1.0', ['layer1.1']], TypeError, 'not both'),
        (['layer1.0', 'layer1.1', 'layer1.1'], ValueError, r"\['layer1\.1'\] more than once"),
        ([['layer1.0'], ['layer1.0']], ValueError, r"\['layer1\.0'\] more than once"),
    ],
)
def test_blocks_that_are_not_there(blocks, error, message):
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        TrajectoryRecorder(StepResNet(18), blocks=blocks)


def test_models_without_residual_blocks():
    with pytest.raises(ValueError, match='it repeats no module'):
        TrajectoryRecorder(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    from torchvision import models

    with pytest.raises(ValueError, match=r'17 x InvertedResidual: features\.1 ... features\.17'):
        TrajectoryRecorder(models.mobilenet_v2())


def test_stages_of_a_single_block():
    model = nn.Sequential(nn.Sequential(Scaled()), nn.Sequential(Scaled()))
    with pytest.raises(ValueError, match=r'exclude_first leaves none.*0\.0, 1\.0'):
        TrajectoryRecorder(model)
    assert TrajectoryRecorder(model, exclude_first=False).stages.tolist() == [0, 1]


class Adds(nn.Conv2d):
    def forward(self, x):
        return x + super().forward(x)


class AddsInPlace(nn.Conv2d):
    def forward(self, x):
        return torch.relu(x.add_(super().forward(x)))


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_a_block_that_writes_to_its_input_is_refused_in_every_mode(mode):
    model = nn.Sequential(*(AddsInPlace(3, 3, 3, padding=1) for _ in range(2)))
    with mode():
        images = torch.randn(2, 3, 8, 8)  # an inference tensor has no version counter
        recorder = TrajectoryRecorder(model, blocks='*')
        with pytest.raises(ValueError, match='changes its input in place'), recorder:
            model(images)


def test_inference_mode_records_the_same():
    model = nn.Sequential(*(Adds(3, 3, 3, padding=1) for _ in range(2)))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), TrajectoryRecorder(model, blocks='*') as expected:
        model(x)
    with torch.inference_mode(), TrajectoryRecorder(model, blocks='*') as record:
        model(x.clone())
    assert torch.equal(record.nsi, expected.nsi)


@pytest.mark.parametrize('step', ['attention', 'unit'])
@pytest.mark.parametrize('kind', ['SqueezeExcitation', 'ECA'])
def test_a_step_size_as_mmdetection_s_plugin_and_as_a_residual_step(kind, step):
    mmdet = pytest.importorskip('mmdet.models')

    def plugins(position):
        return [dict(cfg=dict(type=f'mmstepnet.{kind}'), position=position)]

    settings = dict(depth=50, base_channels=16, norm_eval=False)
    theirs = mmdet.ResNet(**settings, plugins=plugins('after_conv3'))
    ours = StepResNet(**settings, plugins=plugins('residual_step'))
    for model in (theirs, ours):  # MMDetection's eval() returns nothing
        model.eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    for number in range(1, 5):
        pairs = zip(getattr(theirs, f'layer{number}'), getattr(ours, f'layer{number}'), strict=True)
        for block, own in pairs:
            (name,) = block.after_conv3_plugin_names
            own.step.step_size.load_state_dict(getattr(block, name).state_dict())
    images = torch.randn(3, 3, 64, 64)
    recorded = []
    for model in (theirs, ours):
        with torch.no_grad(), TrajectoryRecorder(model, step=step) as record:
            model(images)
        recorded.append(record)
    torch.testing.assert_close(recorded[0].nsi, recorded[1].nsi, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(recorded[0].dt, recorded[1].dt, rtol=1e-4, atol=1e-6)


class NotHe(nn.Module):
    """Named like a block of He et al., but its increment is scaled after the last norm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.downsample = None

    def forward(self, x):
        f = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + 0.1 * f).relu()


def test_a_sample_of_nan_does_not_vouch_for_a_block():
    model = nn.Sequential(NotHe(), NotHe()).eval()
    images = torch.rand(3, 4, 5, 5)
    spoilt = images.clone()
    spoilt[0] = torch.nan
    recorder = TrajectoryRecorder(model, exclude_first=False, nan_policy='omit')
    with torch.no_grad(), pytest.raises(ValueError, match='does not return activation'), recorder:
        model(spoilt)
        model(images)


class Nested(nn.Module):
    """Blocks that hand lists of lists on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block([[x]])[0][0]
        return x


def test_blocks_without_a_tensor_are_named():
    model = Nested()
    recorder = TrajectoryRecorder(model, blocks='blocks.*', exclude_first=False)
    with torch.no_grad(), pytest.raises(ValueError, match='without a tensor'), recorder:
        model(torch.rand(2, 3))
