import argparse
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
import timm
import torch
import torchvision
from mmengine.registry import init_default_scope
from timm.layers import EcaModule, SEModule
from torch import nn

from mmstepnet.models import StepResNet, StepResNetCifar
from mmstepnet.registry import MODELS
from mmstepnet.utils.checkpoint import CheckpointError
from mmstepnet.utils.resnet_weights import convert_resnet, read_resnet_weights

DATA = Path(os.environ.get('MMSTEPNET_SHARED_DATA', Path(__file__).parents[3] / 'shared' / 'data'))


def _as_others_name_it(net, shortcut, head):
    state = {
        'module.' + key.replace('.downsample.', f'.{shortcut}.'): value
        for key, value in net.state_dict().items()
        if 'num_batches_tracked' not in key
    }
    return {
        **state,
        f'module.{head}.weight': torch.rand(4, net.feat_dim),
        f'module.{head}.bias': torch.rand(4),
    }


def _randomise(net):
    """Weights and running statistics as training could leave them."""
    for name, value in net.state_dict().items():
        if name.endswith('running_var'):
            value.uniform_(0.5, 2)
        elif name.endswith('running_mean') or name.endswith('bias'):
            value.normal_(0, 0.2)
        elif value.dim() == 1:
            value.uniform_(0.3, 0.8)
    return net.eval()


def _trunk(weights):
    return {k.removeprefix('backbone.'): v for k, v in weights.items() if k.startswith('backbone.')}


def _build(backbone, **arguments):
    kind = dict(StepResNet=StepResNet, StepResNetCifar=StepResNetCifar)
    cfg = dict(backbone, **arguments)
    return kind[cfg.pop('type').removeprefix('mmstepnet.')](**cfg)


def _stage_outputs(net, x):
    """Of torchvision's class, which timm's shares the names with."""
    x = net.maxpool((net.relu if hasattr(net, 'relu') else net.act1)(net.bn1(net.conv1(x))))
    outputs = []
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        x = stage(x)
        outputs.append(x)
    return outputs


def _se(**arguments):
    return dict(block_args=dict(attn_layer=partial(SEModule, **arguments)))


def _eca(channels, **arguments):
    return EcaModule(kernel_size=9)


SE, ECA = 'mmstepnet.SqueezeExcitation', 'mmstepnet.ECA'
# A network of torchvision or timm, and the backbone's arguments expected for it.
NETWORKS = {
    'torchvision 18': (torchvision.models.resnet18, dict(depth=18)),
    'torchvision 34': (torchvision.models.resnet34, dict(depth=34)),
    'torchvision 50': (torchvision.models.resnet50, dict(depth=50)),
    'timm 50': ('resnet50', dict(depth=50)),
    'timm 18, one channel': (
        partial(timm.create_model, 'resnet18', in_chans=1),
        dict(depth=18, in_channels=1),
    ),
    'timm 50c': ('resnet50c', dict(depth=50, deep_stem=True)),
    'timm 18d': ('resnet18d', dict(depth=18, deep_stem=True, avg_down=True)),
    'timm 50s': ('resnet50s', dict(depth=50, stem_channels=128, deep_stem=True)),
    'timm SE 50': ('seresnet50', dict(depth=50, plugins=[dict(cfg=dict(type=SE))])),
    'timm SE 18': (
        'seresnet18',  # at least eight channels between SE's layers: a reduction of 8 for 64
        dict(
            depth=18,
            plugins=[
                dict(cfg=dict(type=SE, reduction=8), stages=(True, False, False, False)),
                dict(cfg=dict(type=SE), stages=(False, True, True, True)),
            ],
        ),
    ),
    'timm SE 18, a quarter, no biases': (
        partial(timm.create_model, 'resnet18', **_se(rd_ratio=0.25, bias=False)),
        dict(depth=18, plugins=[dict(cfg=dict(type=SE, reduction=4, bias=False))]),
    ),
    'timm ECA 50d': (
        'ecaresnet50d',
        dict(depth=50, deep_stem=True, avg_down=True, plugins=[dict(cfg=dict(type=ECA))]),
    ),
    'timm ECA 18, kernel of 9': (
        partial(timm.create_model, 'resnet18', block_args=dict(attn_layer=_eca)),
        dict(depth=18, plugins=[dict(cfg=dict(type=ECA, kernel_size=9))]),
    ),
}


@pytest.mark.parametrize('name', NETWORKS)
def test_features_are_those_of_the_network_converted(name):
    make, expected = NETWORKS[name]
    net = _randomise(timm.create_model(make) if isinstance(make, str) else make())
    weights, backbone = convert_resnet(net.state_dict())
    assert backbone == dict(type='mmstepnet.StepResNet', **expected)
    ours = _build(backbone).eval()
    ours.load_state_dict(_trunk(weights))  # nothing missing, nothing unexpected
    x = torch.randn(1, expected.get('in_channels', 3), 75, 52)
    with torch.no_grad():
        for want, got in zip(_stage_outputs(net, x), ours(x), strict=True):
            assert (got - want).norm() <= 1e-6 * want.norm()
    assert weights.keys() - {f'backbone.{key}' for key in ours.state_dict()} == {
        'head.fc.weight',
        'head.fc.bias',
    }
    assert torch.equal(weights['head.fc.weight'], net.fc.weight)
    assert torch.equal(weights['head.fc.bias'], net.fc.bias)


@pytest.mark.parametrize('depth', [101, 152])
@pytest.mark.parametrize('source', ['torchvision', 'timm'])
def test_names_and_shapes_of_the_deep_ones(source, depth):
    """convert_resnet holds the weights against the backbone that it names."""
    with torch.device('meta'):
        if source == 'torchvision':
            net = getattr(torchvision.models, f'resnet{depth}')()
            expected = dict(depth=depth)
        else:
            net = timm.create_model(f'seresnet{depth}')
            expected = dict(depth=depth, plugins=[dict(cfg=dict(type=SE))])
    weights, backbone = convert_resnet(net.state_dict())
    assert backbone == dict(type='mmstepnet.StepResNet', **expected)
    assert len(weights) == len(net.state_dict())


def test_a_classifier_gives_the_logits_of_the_network_converted():
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    net = _randomise(timm.create_model('seresnet18', num_classes=7))
    weights, backbone = convert_resnet(net.state_dict())
    model = MODELS.build(
        dict(
            type='mmpretrain.ImageClassifier',
            backbone=backbone,
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=7, in_channels=512),
        )
    ).eval()
    model.load_state_dict(weights)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        want, got = net(x), model(x)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_plain_weights_leave_the_step_sizes_fresh_and_no_more(tmp_path):
    """By init_cfg as in a detector; torchvision's own file leaves its classifier as well."""
    plugins = [dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]
    net = _randomise(torchvision.models.resnet18())
    weights, backbone = convert_resnet(net.state_dict())
    ours = _build(backbone, plugins=plugins)
    # torch supplies the counters of batches that a state dict of old has not.
    own_keys = {k for k in ours.state_dict() if '.step.' in k and 'num_batches_tracked' not in k}
    for state, left in ((_trunk(weights), set()), (net.state_dict(), {'fc.weight', 'fc.bias'})):
        outcome = ours.load_state_dict(state, strict=False)
        assert set(outcome.missing_keys) == own_keys
        assert set(outcome.unexpected_keys) == left

    path = tmp_path / 'resnet18.pth'
    torch.save(dict(state_dict=weights, meta={}), path)
    pretrained = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    ours = _build(backbone, plugins=plugins, frozen_stages=1, init_cfg=pretrained)
    ours.init_weights()
    assert len(ours.fresh_steps()) == 8
    for key, value in net.state_dict().items():
        if not key.startswith('fc.'):
            assert torch.equal(ours.state_dict()[key], value), key


def test_attention_that_came_along_is_not_fresh(tmp_path):
    net = _randomise(timm.create_model('seresnet18'))
    weights, backbone = convert_resnet(net.state_dict())
    torch.save(dict(state_dict=weights, meta={}), tmp_path / 'se.pth')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'se.pth'), prefix='backbone.')
    ours = _build(backbone, init_cfg=pretrained)
    ours.init_weights()
    assert not ours.fresh_steps()
    step_size = ours.layer4[1].step.step_size
    assert torch.equal(step_size.mlp[2].weight, net.layer4[1].se.fc2.weight[:, :, 0, 0])


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('resnext50_32x4d', r'does not fit StepResNet\(depth=50\): .*layer1.0.conv1.weight \(128,'),
        ('wide_resnet50_2', r'does not fit StepResNet\(depth=50\)'),
        ('resnet50_gn', r'106 missing \(first: bn1.running_mean\)'),
        ('resnet50t', r'stem.0.weight \(24, 3, 3, 3\) instead of \(32, 3, 3, 3\)'),
        ('resnet26', r'stages of \[2, 2, 2, 2\] bottleneck blocks; StepResNet has the depths 18'),
        ('skresnet18', r"no weights named 'layer1.0.conv1.paths.0.conv.weight'"),
        ('resnetrs50', r"no weights named 'maxpool.0.weight'"),
        ('res2net50_26w_4s', r"no weights named 'layer1.0.convs.0.weight'"),
        ('legacy_seresnet18', r"no weights named 'layer0.conv1.weight'"),
        ('vit_tiny_patch16_224', r"no weights named 'cls_token'"),
    ],
)
def test_other_networks_are_refused(name, message):
    with torch.device('meta'):
        net = timm.create_model(name)
    with pytest.raises(ValueError, match=message):
        convert_resnet(net.state_dict())


@pytest.mark.parametrize('attention', ['ese', 'ecam', 'cbam', 'gc'])
def test_other_attention_is_refused(attention):
    with torch.device('meta'):
        net = timm.create_model('resnet18', block_args=dict(attn_layer=attention))
    with pytest.raises(ValueError, match=r"no weights named 'layer1\.0\.se\..* or ECA"):
        convert_resnet(net.state_dict())


def test_attention_in_some_blocks_of_a_stage_is_refused():
    state = timm.create_model('seresnet18').state_dict()
    state = {key: value for key, value in state.items() if '.1.se.' not in key}
    with pytest.raises(
        ValueError, match=r'16 missing \(first: layer1.1.step.step_size.mlp.0.weight'
    ):
        convert_resnet(state)


def test_what_is_ours_already_is_said_so():
    with pytest.raises(ValueError, match='there is nothing to convert'):
        convert_resnet({'backbone.conv1.weight': torch.zeros(1)})


def test_stages_and_weights_that_make_no_network_are_refused():
    state = {f'layer{i}.0.conv1.weight': torch.zeros(1) for i in (1, 2)}
    with pytest.raises(ValueError, match=r'layer1 to layer4, .* found layer1, layer2'):
        convert_resnet(state)
    state = {f'layer{i}.0.conv1.weight': torch.zeros(1) for i in (1, 2, 3)}
    with pytest.raises(
        ValueError, match=r"no weights of a convolution for 'backbone.layer1.0.conv"
    ):
        convert_resnet(state)
    state['layer3.1.conv1.weight'] = torch.zeros(1)
    with pytest.raises(ValueError, match=r'stages of equal length, found \[1, 1, 2\] blocks'):
        convert_resnet(state)
    with pytest.raises(ValueError, match='found none'):
        convert_resnet({'fc.weight': torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r'classifier must be linear, got weights \(2, 2, 1, 1\)'):
        convert_resnet({'fc.weight': torch.zeros(2, 2, 1, 1)})


@pytest.mark.parametrize(
    ('arguments', 'shortcut', 'head'),
    [
        (dict(depth=20, block='basic', shortcut='pad'), 'shortcut', 'linear'),
        (dict(depth=14, block='basic'), 'shortcut', 'fc'),
        (dict(depth=20), 'downsample', 'classifier'),
    ],
)
def test_cifar_architectures_are_found_and_every_weight_kept(arguments, shortcut, head):
    net = StepResNetCifar(**arguments, widths=(4, 8, 16), in_channels=1)
    weights, backbone = convert_resnet(_as_others_name_it(net, shortcut, head))
    assert backbone == dict(
        type='mmstepnet.StepResNetCifar', **arguments, widths=(4, 8, 16), in_channels=1
    )
    twin = _build(backbone)
    twin.load_state_dict(_trunk(weights))
    for key, value in net.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key
    assert weights['head.fc.weight'].shape == (4, net.feat_dim)


def test_preactivated_cifar_networks_are_refused():
    net = StepResNetCifar(14, block='basic', pre_activation=True)
    state = _as_others_name_it(net, 'shortcut', 'linear')
    with pytest.raises(ValueError, match=r"no weights named 'module\.bn_last\.weight'"):
        convert_resnet(state)
    state = {key: value for key, value in state.items() if 'bn_last' not in key}
    with pytest.raises(ValueError, match='does not fit StepResNetCifar'):
        convert_resnet(state)


def _saved(content, path):
    torch.save(content, path)
    return str(path)


def test_weights_are_found_where_training_scripts_keep_them(tmp_path):
    plain = nn.Linear(2, 1).state_dict()
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1)).state_dict()
    # What an argument parser returned must not keep the safe loader from reading.
    rest = dict(args=argparse.Namespace(lr=0.1), epoch=3, optimizer={})
    for content, container in (
        (plain, None),
        (dict(rest, arch='resnet50', state_dict=plain), 'state_dict'),
        (dict(rest, arch='resnet50', state_dict=plain, state_dict_ema=averaged), 'state_dict_ema'),
        (dict(rest, model=plain), 'model'),
        (dict(rest, model=plain, model_ema=averaged), 'model_ema'),
    ):
        weights, found = read_resnet_weights(_saved(content, tmp_path / 'a.pth'))
        assert found == container
        expected = averaged if 'ema' in (container or '') else plain
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_averaged_weights_lose_their_wrapper():
    net = timm.create_model('resnet18')
    averaged = torch.optim.swa_utils.AveragedModel(net).state_dict()
    weights, _ = convert_resnet(averaged)
    assert torch.equal(weights['backbone.conv1.weight'], net.conv1.weight)


def test_safetensors_are_read(tmp_path):
    safetensors = pytest.importorskip('safetensors.torch')
    state = nn.Linear(2, 1).state_dict()
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    weights, container = read_resnet_weights(str(tmp_path / 'model.safetensors'))
    assert container is None and weights.keys() == {'weight', 'bias'}
    assert torch.equal(weights['weight'], state['weight'])
    (tmp_path / 'bad.safetensors').write_bytes(b'not one')
    with pytest.raises(CheckpointError, match=r'bad\.safetensors is not a safetensors file'):
        read_resnet_weights(str(tmp_path / 'bad.safetensors'))
    with pytest.raises(CheckpointError, match=r'no\.safetensors does not exist'):
        read_resnet_weights(str(tmp_path / 'no.safetensors'))


def test_anti_aliased_networks_are_known_by_name(tmp_path):
    """Their weights are those of a plain ResNet-50 in name and shape."""
    state = nn.Linear(2, 1).state_dict()
    with pytest.raises(CheckpointError, match='is of resnetblur50, which blurs or averages'):
        read_resnet_weights(_saved(state, tmp_path / 'resnetblur50-84f4748f.pth'))
    training = dict(arch='seresnetaa50d', state_dict=state)
    with pytest.raises(CheckpointError, match='is of resnetaa50, which'):
        read_resnet_weights(_saved(training, tmp_path / 'model_best.pth.tar'))


def test_files_without_weights_are_refused(tmp_path):
    for content in ([1, 2], dict(a=1), {3: torch.zeros(1)}):
        with pytest.raises(CheckpointError, match=r'a\.pth holds'):
            read_resnet_weights(_saved(content, tmp_path / 'a.pth'))
    (tmp_path / 'b.pth').write_bytes((tmp_path / 'a.pth').read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r'b\.pth is truncated'):
        read_resnet_weights(str(tmp_path / 'b.pth'))
    with pytest.raises(CheckpointError, match=r'no\.pth does not exist'):
        read_resnet_weights(str(tmp_path / 'no.pth'))


def _test_pictures():
    """The 10,000 test pictures, (N, 3, 32, 32) normalised, and their labels."""
    pack = np.load(DATA / 'cifar10_jpeg.npz')
    data, offsets = pack['test_jpeg'], pack['test_offsets']
    pictures = np.stack(
        [
            cv2.imdecode(data[start:end], cv2.IMREAD_COLOR)[:, :, ::-1]
            for start, end in pairwise(offsets)
        ]
    )
    pictures = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (pictures - mean) / std, torch.from_numpy(pack['test_labels']).long()


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / 'resnet_cifar10').is_dir(), reason='needs the shared data')
@pytest.mark.parametrize(
    ('file', 'depth', 'accuracy'),
    [
        ('resnet20-12fca82f.th', 20, 81.03),
        ('resnet32-d509ac18.th', 32, 82.56),
        ('resnet56-4bfd9763.th', 56, 83.20),
    ],
)
def test_trained_networks_keep_their_accuracy(file, depth, accuracy):
    pytest.importorskip('mmpretrain.models')
    init_default_scope('mmpretrain')
    path = DATA / 'resnet_cifar10' / file
    weights, container = read_resnet_weights(str(path))
    assert container == 'state_dict'
    state, backbone = convert_resnet(weights)
    assert backbone == dict(
        type='mmstepnet.StepResNetCifar', depth=depth, block='basic', shortcut='pad'
    )
    model = MODELS.build(
        dict(
            type='mmpretrain.ImageClassifier',
            backbone=backbone,
            neck=dict(type='GlobalAveragePooling'),
            head=dict(type='LinearClsHead', num_classes=10, in_channels=64),
        )
    )
    model.load_state_dict(state)
    model.eval()
    pictures, labels = _test_pictures()
    with torch.inference_mode():
        scores = torch.cat([model(batch) for batch in pictures.split(500)])
    correct = (scores.argmax(1) == labels).double().mean().item() * 100
    assert abs(correct - accuracy) <= 0.1


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'fc.bias': torch.zeros(5)}, '1000 outputs and 5 biases'),
        ({'fc.weight': torch.zeros(1000, 2048)}, 'takes 2048 features, the network has 512'),
        ({'linear.weight': torch.zeros(1000, 512)}, 'mean the same: head.fc.weight'),
    ],
)
def test_a_classifier_that_does_not_fit_is_refused(changes, message):
    state_dict = torchvision.models.resnet18().state_dict() | changes
    with pytest.raises(ValueError, match=message):
        convert_resnet(state_dict)


def test_folders_are_not_taken_for_networks(tmp_path):
    folder = tmp_path / 'resnetaa50_and_others'
    folder.mkdir()
    torch.save(torchvision.models.resnet18().state_dict(), folder / 'resnet18.pth')
    read_resnet_weights(folder / 'resnet18.pth')
