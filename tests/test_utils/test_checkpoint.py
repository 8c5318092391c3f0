import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from mmstepnet.utils.checkpoint import CheckpointError, check_same_network, newest_checkpoint


def classifier(classes, width=4):
    return nn.ModuleDict(dict(backbone=nn.Linear(3, width), fc=nn.Linear(width, classes)))


def message(model, trained):
    with pytest.raises(CheckpointError) as error:
        check_same_network(model, dict(state_dict=trained.state_dict()), 'a.pth')
    return str(error.value)


def test_another_number_of_classes_is_said_so():
    assert message(classifier(10), classifier(100)) == (
        'checkpoint a.pth was trained on another number of classes than the config says: '
        'fc has 100 outputs instead of 10. Set num_classes as it was in training'
    )
    check_same_network(classifier(10), dict(state_dict=classifier(10).state_dict()), 'a.pth')


def test_other_differences_are_not_taken_for_it():
    text = message(classifier(10), classifier(10, width=8))
    assert 'another network' in text and '3 of another shape' in text
    assert 'another network' in message(classifier(10), nn.ModuleDict(dict(fc=nn.Linear(4, 5))))


def save(folder, epoch, pointer=True):
    folder.mkdir(exist_ok=True)
    path = folder / f'epoch_{epoch}.pth'
    torch.save(dict(meta=dict(epoch=epoch), state_dict={'w': torch.zeros(1)}), path)
    if pointer:
        (folder / 'last_checkpoint').write_text(str(path))
    return str(path)


def test_a_copied_run_goes_on_from_its_own_checkpoints(tmp_path):
    one, two = tmp_path / 'one', tmp_path / 'two'
    save(one, 3)
    shutil.copytree(one, two)
    save(one, 5)
    assert newest_checkpoint(two)[0] == str(two / 'epoch_3.pth')
    # As a power failure leaves it.
    (two / 'last_checkpoint').write_bytes(bytes(30))
    assert newest_checkpoint(two)[0] == str(two / 'epoch_3.pth')


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    for epoch in (1, 2):
        path = Path(save(tmp_path, epoch))
        path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(CheckpointError, match=r'can be read: .*epoch_2.*; .*epoch_1'):
        newest_checkpoint(tmp_path)


def test_checkpoints_in_another_folder(tmp_path):
    run, elsewhere = tmp_path / 'run', tmp_path / 'elsewhere'
    run.mkdir()
    save(elsewhere, 2)
    newest = save(elsewhere, 4)
    (run / 'last_checkpoint').write_text(str(elsewhere / 'epoch_2.pth'))
    assert newest_checkpoint(run)[0] == newest
