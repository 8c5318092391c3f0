import json

import numpy as np
import pytest
from PIL import Image

from mmstepnet.datasets import check_coco


@pytest.fixture
def content():
    return dict(
        categories=[dict(id=3, name='cell'), dict(id=7, name='plate')],
        images=[
            dict(id=11, file_name='a.png', width=40, height=30),
            dict(id=12, file_name='b.png', width=20, height=20),
        ],
        annotations=[
            dict(id=1, image_id=11, category_id=3, bbox=[0, 0, 40, 30], area=1200, iscrowd=0),
            dict(id=2, image_id=11, category_id=7, bbox=[5.5, 5, 3, 4], area=12, iscrowd=1),
        ],
    )


@pytest.fixture
def check(tmp_path):
    """Write content and pictures, return the problems as (fatal, message without the file)."""

    def run(content, **kwargs):
        for image in content['images']:
            if not (tmp_path / image['file_name']).exists():
                size = image['height'], image['width'], 3
                Image.fromarray(np.zeros(size, np.uint8)).save(tmp_path / image['file_name'])
        ann_file = tmp_path / 'ann.json'
        ann_file.write_text(json.dumps(content))
        problems = check_coco(str(ann_file), str(tmp_path), **kwargs)
        assert all(problem.message.startswith(f'{ann_file}: ') for problem in problems)
        return [(p.fatal, p.message.removeprefix(f'{ann_file}: ')) for p in problems]

    return run


def test_a_right_set_has_no_problems(check, content):
    assert check(content, classes=['cell', 'plate'], decode=True) == []


@pytest.mark.parametrize(
    'change, fatal, message',
    [
        (dict(bbox=[1, 2, 0, 4]), False, 'box [1, 2, 0, 4] with area 12 has no extent'),
        (dict(bbox=[1, 2, 3, -4]), False, 'box [1, 2, 3, -4] with area 12 has no extent'),
        (dict(area=0), False, 'with area 0 has no extent'),
        (dict(bbox=[1, 2, 0.5, 4]), False, 'less than one pixel wide'),
        (dict(bbox=[40, 2, 3, 4]), False, 'is outside the picture of 40x30'),
        (dict(bbox=[-9, 2, 3, 4]), False, 'is outside the picture of 40x30'),
        (dict(bbox=[38, 2, 9, 4]), False, 'sticks out of the picture of 40x30'),
        (dict(bbox=[1, 2, 3]), True, 'bbox is [1, 2, 3], not four finite numbers'),
        (dict(bbox=[1, 2, 3, float('nan')]), True, 'bbox is [1, 2, 3, nan]'),
        (dict(bbox=[1, 2, 3, 10**400]), True, 'not four finite numbers'),
        (dict(bbox=None), True, 'bbox is None'),
        (dict(area='large'), True, "area is 'large'"),
        (dict(category_id=4), True, 'category id 4 is unknown, known are [3, 7]'),
    ],
)
def test_an_annotation_is_named_by_id_and_picture(check, content, change, fatal, message):
    content['annotations'][1].update(change)
    [(found, text)] = check(content)
    assert found is fatal
    assert text.startswith('annotation 2 of image 11 (a.png): ') and message in text


def test_a_box_may_stick_out_by_a_rounding_error(check, content):
    content['annotations'][1]['bbox'] = [-0.4, 0, 40.9, 30.5]
    assert check(content) == []


def test_annotation_of_no_picture(check, content):
    content['annotations'][0]['image_id'] = 13
    assert check(content) == [(True, 'annotation 1: image id 13 is unknown')]


@pytest.mark.parametrize(
    'key, noun', [('images', 'image'), ('annotations', 'annotation'), ('categories', 'category')]
)
def test_ids_are_there_and_unique(check, content, key, noun):
    first, second = content[key]
    second['id'] = first['id']
    assert (True, f'{noun} id {first["id"]} is used more than once') in check(content)
    second['id'] = [1]
    assert (True, f'{noun} at position 1 has no number as id: [1]') in check(content)


@pytest.mark.parametrize(
    'classes, message',
    [
        (['cell', 'nucleus'], "no category for classes ['nucleus']"),
        (['plate', 'cell'], "in the order ['cell', 'plate'], the classes in the order ['plate'"),
    ],
)
def test_classes_that_would_get_wrong_labels(check, content, classes, message):
    problems = check(content, classes=classes)
    assert problems[0][0] and message in problems[0][1]


def test_classes_may_be_a_part(check, content):
    [(fatal, message)] = check(content, classes=['cell'])
    assert not fatal and message.startswith("1 boxes of 'plate' are not used")


def test_category_names_are_unique(check, content):
    content['categories'][1]['name'] = 'cell'
    assert check(content) == [(True, "category name 'cell' is used more than once")]


@pytest.mark.parametrize('name', [None, 5, ['cell']])
def test_category_names_are_texts(check, content, name):
    content['categories'][1]['name'] = name
    number = content['categories'][1]['id']
    assert check(content) == [(True, f'category {number}: name is {name!r}, not a text')]
    assert (True, f'category {number}: name is {name!r}, not a text') in check(
        content, classes=['cell']
    )


def test_a_picture_name_that_no_file_can_have(content, tmp_path):
    content['images'][1]['file_name'] = 'b\0.png'
    (tmp_path / 'ann.json').write_text(json.dumps(content))
    [problem] = [
        p for p in check_coco(str(tmp_path / 'ann.json'), str(tmp_path)) if '12' in p.message
    ]
    assert problem.fatal and 'null' in problem.message


def test_pictures(check, content, tmp_path):
    (tmp_path / 'a.png').write_bytes(b'')
    (tmp_path / 'b.png').write_bytes(b'no picture at all')
    content['images'].append(dict(id=13, file_name='c.png', width=8, height=8))
    Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(tmp_path / 'c.png')
    problems = check(content, decode=True)
    assert all(fatal for fatal, _ in problems)
    for (_, message), start, reason in zip(
        problems,
        [
            f'image {i}: {tmp_path / name}'
            for i, name in ((11, 'a.png'), (12, 'b.png'), (13, 'c.png'))
        ],
        ['is an empty file', 'can not be decoded', 'is 9x8, the file says 8x8'],
        strict=True,
    ):
        assert message.startswith(start) and reason in message


def test_truncated_and_missing_pictures(check, content, tmp_path):
    noise = np.random.RandomState(0).randint(256, size=(30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / 'full.jpg')
    data = (tmp_path / 'full.jpg').read_bytes()
    (tmp_path / 'a.png').write_bytes(data[: len(data) // 2])
    check(content)
    (tmp_path / 'b.png').unlink()
    ann_file = str(tmp_path / 'ann.json')
    missing = f'image 12: {tmp_path / "b.png"}: No such file or directory'
    assert [p.message for p in check_coco(ann_file, str(tmp_path))] == [f'{ann_file}: {missing}']
    assert check_coco(ann_file) == []
    truncated, _ = check_coco(ann_file, str(tmp_path), decode=True)
    assert f'image 11: {tmp_path / "a.png"} can not be decoded' in truncated.message


def test_picture_turned_by_exif(check, content, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save(tmp_path / 'a.png', exif=exif)
    assert check(content, decode=True) == []


@pytest.mark.parametrize('key', ['width', 'height', 'file_name'])
def test_picture_entries(check, content, tmp_path, key):
    check(content)
    del content['images'][1][key]
    (tmp_path / 'ann.json').write_text(json.dumps(content))
    [problem] = check_coco(str(tmp_path / 'ann.json'), str(tmp_path))
    assert problem.fatal and 'image 12' in problem.message


@pytest.mark.parametrize(
    'text, message',
    [
        ('{"images": [', 'broken JSON at line 1, column 13'),
        ('[]', "no list of objects under 'images'"),
        ('{"images": [], "annotations": []}', "no list of objects under 'categories'"),
        ('{"images": [1], "annotations": [], "categories": []}', "under 'images'"),
    ],
)
def test_broken_files(tmp_path, text, message):
    ann_file = tmp_path / 'ann.json'
    ann_file.write_text(text)
    problem = check_coco(str(ann_file))[0]
    assert problem.fatal and problem.message.startswith(f'{ann_file}: ')
    assert message in problem.message


def test_missing_and_binary_files(tmp_path):
    [problem] = check_coco(str(tmp_path / 'none.json'))
    assert problem.fatal and 'none.json: can not be read: No such file' in problem.message
    (tmp_path / 'binary.json').write_bytes(b'\xff\xfe\x00')
    [problem] = check_coco(str(tmp_path / 'binary.json'))
    assert problem.fatal and 'not a JSON text file' in problem.message


def test_warns_of_exactly_what_mmdet_leaves_out(check, content, tmp_path):
    pytest.importorskip('mmdet')
    from mmdet.datasets import CocoDataset

    random = np.random.RandomState(0)
    corners = random.randint(-12, 50, size=(300, 2)).tolist()
    sizes = random.choice([0, 0.5, 1, 2, 8, 30], size=(300, 2)).tolist()
    content['annotations'] = [
        dict(id=i, image_id=11, category_id=3, bbox=corner + size, area=size[0] * size[1])
        for i, (corner, size) in enumerate(zip(corners, sizes, strict=True))
    ]
    warned = [message for _, message in check(content) if 'left out' in message]
    dataset = CocoDataset(
        ann_file=str(tmp_path / 'ann.json'),
        data_prefix=dict(img=str(tmp_path)),
        metainfo=dict(classes=('cell', 'plate')),
        pipeline=[],
        test_mode=True,
    )
    kept = sum(len(dataset.get_data_info(i)['instances']) for i in range(2))
    assert len(warned) == 300 - kept
    assert 0 < kept < 300


@pytest.mark.parametrize('filter_empty_gt', [False, True])
@pytest.mark.parametrize('min_size', [0, 21, 31])
@pytest.mark.parametrize('classes', [('cell', 'plate'), ('plate',)])
def test_counts_the_pictures_that_mmdet_leaves_out(
    check, content, tmp_path, filter_empty_gt, min_size, classes
):
    pytest.importorskip('mmdet')
    from mmdet.datasets import CocoDataset

    content['images'] += [
        dict(id=13, file_name='c.png', width=50, height=50),
        dict(id=14, file_name='d.png', width=90, height=31),
    ]
    content['annotations'].append(
        dict(id=3, image_id=14, category_id=3, bbox=[0, 0, 9, 9], area=81, iscrowd=0)
    )
    filter_cfg = dict(filter_empty_gt=filter_empty_gt, min_size=min_size)
    found = check(content, classes=classes, filter_cfg=filter_cfg)
    counted = sum(
        int(message.split()[0])
        for _, message in found
        if 'pictures' in message and 'left out' in message
    )
    dataset = CocoDataset(
        ann_file=str(tmp_path / 'ann.json'),
        data_prefix=dict(img=str(tmp_path)),
        metainfo=dict(classes=classes),
        pipeline=[],
        filter_cfg=filter_cfg,
        lazy_init=True,
    )
    dataset.data_list = dataset.load_data_list()
    left = len(dataset.filter_data())
    assert counted == 4 - left
    assert any(fatal for fatal, _ in found) == (left == 0)


def test_a_set_without_pictures_is_refused(check, content):
    content.update(images=[], annotations=[])
    [(fatal, message)] = check(content)
    assert fatal
    assert message == 'the file lists no pictures'
