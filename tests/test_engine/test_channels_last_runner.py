"""The runner in channels_last: the layout is there from the start and changes no result."""

import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmstepnet.engine.runner import ChannelsLastRunner


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
