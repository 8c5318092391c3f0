import pytest
from torch import nn

from mmstepnet.utils.checkpoint import CheckpointError, check_same_network


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
