import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmstepnet.engine.hooks import HeadFigureHook
from mmstepnet.models.backbones import AttentionConvNet


def make(tmp_path, **kwargs):
    model = AttentionConvNet(depth=2, embed_dims=8, feedforward_channels=8, num_heads=3, **kwargs)
    return SimpleNamespace(model=model, work_dir=tmp_path, epoch=0, max_epochs=4)


def move(runner, amount):
    with torch.no_grad():
        for layer in runner.model.layers:
            layer.attention.centers += amount


def epochs(hook, runner, last):
    for epoch in range(runner.epoch, last):
        runner.epoch = epoch
        move(runner, 0.5)
        hook.after_train_epoch(runner)


def test_follows_the_centres_and_goes_on_after_a_break(tmp_path):
    runner = make(tmp_path)
    start = runner.model.layers[1].attention.centers.clone()
    hook = HeadFigureHook(interval=2)
    hook.before_train(runner)
    epochs(hook, runner, 3)

    # Broken off in epoch 3, resumed from the checkpoint of epoch 2.
    runner.epoch = 2
    move(runner, -0.5)
    hook = HeadFigureHook(interval=2)
    hook.before_train(runner)
    epochs(hook, runner, 4)
    hook.after_train(runner)

    records = json.loads((tmp_path / 'heads/heads.json').read_text())
    assert [record['epoch'] for record in records] == [0, 2, 4]
    for record, moved in zip(records, (0, 1.0, 2.0), strict=True):
        centers = torch.tensor(record['layers']['layers.1.attention']['centers'])
        torch.testing.assert_close(centers, start + moved)
    names = {file.name for file in (tmp_path / 'heads').iterdir()}
    assert {'epoch_0.png', 'epoch_2.pdf', 'epoch_4.png', 'paths.png', 'paths.pdf'} <= names


@pytest.mark.parametrize('model', [nn.Linear(1, 1), None])
def test_refuses_models_without_centres(tmp_path, model):
    runner = make(tmp_path, position='learned')
    runner.model = model or runner.model
    with pytest.raises(ValueError, match='quadratic'):
        HeadFigureHook().before_train(runner)
    with pytest.raises(ValueError, match='interval=0'):
        HeadFigureHook(interval=0)
