from types import SimpleNamespace

import pytest

from mmstepnet.engine.hooks.stiffness_hook import describe_dataset


class Pictures(SimpleNamespace):
    def __len__(self):
        return 7


@pytest.mark.parametrize(
    'attributes, expected',
    [
        (
            dict(ann_file='a/val.json', data_prefix=dict(img='val')),
            'Pictures a/val.json, 7 samples',
        ),
        (dict(data_prefix=dict(root='a/test'), test_mode=False), 'Pictures a/test, 7 samples'),
        (dict(data_root='a', data_prefix={}, test_mode=True), 'Pictures a test, 7 samples'),
        (dict(data_root='', data_prefix=dict(root='')), 'Pictures train, 7 samples'),
        (dict(split='val'), 'Pictures val, 7 samples'),
    ],
)
def test_a_data_set_is_named_by_the_part_that_was_seen(attributes, expected):
    assert describe_dataset(Pictures(**attributes)) == expected
    wrapped = Pictures(dataset=Pictures(**attributes))
    assert describe_dataset(wrapped) == expected


def test_parts_and_choices_of_a_data_set_are_told_apart():
    train, test = Pictures(split='train'), Pictures(split='test')
    joined = Pictures(datasets=[train, test])
    assert describe_dataset(joined) == 'Pictures train, 7 samples + Pictures test, 7 samples'
    some = [describe_dataset(Pictures(split='test', _indices=i)) for i in (None, 7, [0, 2], [0, 3])]
    assert len(set(some)) == 4
    assert some[:2] == ['Pictures test, 7 samples', 'Pictures test (indices 7), 7 samples']
