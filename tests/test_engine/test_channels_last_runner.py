"""The runner in channels_last: the layout is there from the start and changes no result."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmstepnet.engine.runner import ChannelsLastRunner
from mmstepnet.engine.runner.channels_last_runner import to_channels_last

NARROW = Path(__file__).parents[2] / 'configs/_base_/models/faster_rcnn_r18_narrow.py'


def build(tmp_path, kind: dict):
    torch.manual_seed(0)
    model = dict(
        type='mmpretrain.ImageClassifier',
        backbone=dict(
            type='mmstepnet.StepResNetCifar',
            depth=8,
            block='basic',
            plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))],
        ),
        neck=dict(type='mmpretrain.GlobalAveragePooling'),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=64),
    )
    cfg = Config(dict(model=model, work_dir=str(tmp_path), default_scope='mmpretrain', **kind))
    return RUNNERS.build(cfg).model


def test_same_losses_and_gradients_in_the_other_layout(tmp_path):
    from mmpretrain.structures import DataSample

    plain = build(tmp_path, dict(runner_type='mmengine.Runner')).double()
    last = build(tmp_path, dict(runner_type='mmstepnet.ChannelsLastRunner')).double()
    last.load_state_dict(plain.state_dict())

    seen = []
    layer = last.backbone.layer2
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    pictures = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    samples = [DataSample().set_gt_label(i % 3) for i in range(4)]
    losses = [model.loss(pictures, samples)['loss'] for model in (plain, last)]
    for loss in losses:
        loss.backward()
    handle.remove()

    # Loading weights has kept the layout, and the convolutions hand it on.
    assert all(
        p.is_contiguous(memory_format=torch.channels_last)
        for p in last.parameters()
        if p.dim() == 4
    )
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for ours, theirs in zip(last.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_an_mmengine_config_finds_it():
    assert RUNNERS.get('mmstepnet.ChannelsLastRunner') is ChannelsLastRunner


@pytest.mark.smoke
@pytest.mark.parametrize('dcn', [None, dict(type='DCNv2', deform_groups=1)])
def test_a_detector_has_the_same_losses_and_gradients(tmp_path, dcn):
    """RoIAlign and deformable convolutions read memory without looking at its layout."""
    pytest.importorskip('mmcv.ops')
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    def detector(runner_type):
        cfg = Config.fromfile(NARROW)
        cfg.model.backbone.base_channels = 8
        cfg.model.neck.in_channels = [8, 16, 32, 64]
        if dcn is not None:
            cfg.model.neck.conv_cfg = dcn
        cfg.merge_from_dict(dict(work_dir=str(tmp_path), default_scope='mmdet'))
        cfg.runner_type = runner_type
        return RUNNERS.build(cfg).model

    plain, last = detector('mmengine.Runner'), detector('mmstepnet.ChannelsLastRunner')
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                torch.nn.init.kaiming_normal_(parameter, a=1)
    last.load_state_dict(plain.state_dict())
    size = (64, 96)
    sample = DetDataSample(
        metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size)
    )
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[8.0, 8, 40, 40], [50, 10, 90, 60]]), labels=torch.tensor([0, 3])
    )
    picture = torch.randn(1, 3, *size)
    losses = []
    for model in (plain, last):
        torch.manual_seed(1)  # of the samplers
        parts = model.parse_losses(model.loss(picture, [sample.clone()]))
        parts[0].backward()
        losses.append(torch.stack([*parts[1].values()]).detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for (name, ours), theirs in zip(last.named_parameters(), plain.parameters(), strict=True):
        # Rounding of float32 through deep norms: up to 0.4 %. Wrong maps are off by their own size.
        error = (ours.grad - theirs.grad).norm()
        assert error <= 2e-2 * theirs.grad.norm() + 1e-5, name


def test_what_reads_memory_as_channels_first_is_refused(tmp_path):
    runner = 'mmstepnet.ChannelsLastRunner'
    with pytest.raises(ValueError, match="take sync_bn='torch'"):
        build(tmp_path, dict(runner_type=runner, sync_bn='mmcv'))

    class TOODHead(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match='bbox_head calls ops of MMCV'):
        to_channels_last(torch.nn.ModuleDict(dict(bbox_head=TOODHead())))
