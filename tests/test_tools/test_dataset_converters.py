import json
import os
import shutil
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmstepnet.datasets import check_coco
from tests.tools import load_tool


def run(name, *args):
    """Run a converter's main with the given arguments; returns its module."""
    module = load_tool(f'dataset_converters/{name}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, 'argv', [name, *map(str, args)])
        module.main()
    return module


@pytest.fixture
def shared_data():
    """Folder of the real data sets, outside the project; skips where it is missing."""
    default = Path(__file__).parents[3] / 'shared' / 'data'
    folder = Path(os.environ.get('MMSTEPNET_SHARED_DATA', default))
    if not (folder / 'bccd').is_dir():
        pytest.skip(f'{folder / "bccd"} is missing')
    return folder


def files(folder):
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def boxes(folder, split):
    content = json.loads((folder / 'annotations' / f'{split}.json').read_text())
    found = {image['id']: [] for image in content['images']}
    for annotation in content['annotations']:
        found[annotation['image_id']].append(annotation)
    return content, found


class TestDigits:
    small = ('--train', 12, '--val', 6, '--size', 64)

    @pytest.fixture(scope='class')
    def made(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp('digits') / 'set'
        run('digits2coco', '--out', folder, *self.small)
        return folder

    @pytest.fixture
    def folder(self, made, tmp_path):
        return Path(shutil.copytree(made, tmp_path / 'set'))

    def test_is_valid_coco(self, folder):
        from pycocotools.coco import COCO

        for split, count in (('train', 12), ('val', 6)):
            ann_file = str(folder / 'annotations' / f'{split}.json')
            assert check_coco(ann_file, str(folder / split), tuple('0123456789'), decode=True) == []
            coco = COCO(ann_file)
            assert len(coco.imgs) == len(list((folder / split).iterdir())) == count
            assert coco.getCatIds(catNms=['7']) == [8]

    def test_splits_are_disjoint_and_labels_are_those_of_the_digits(self, folder):
        from sklearn.datasets import load_digits

        target = load_digits().target
        samples = {}
        for split in ('train', 'val'):
            annotations = boxes(folder, split)[0]['annotations']
            samples[split] = {annotation['sample'] for annotation in annotations}
            assert all(a['category_id'] == target[a['sample']] + 1 for a in annotations)
        assert samples['train'] and samples['val']
        assert not samples['train'] & samples['val']

    def test_every_digit_belongs_to_one_split(self, folder):
        splits = run('digits2coco', '--out', folder, *self.small).split_digits(seed=3)
        together = np.concatenate(list(splits.values()))
        assert np.array_equal(np.sort(together), np.arange(1797))

    def test_boxes_do_not_overlap(self, folder):
        count = 0
        for annotations in boxes(folder, 'train')[1].values():
            covered = np.zeros((64, 64), int)
            for x, y, width, height in (annotation['bbox'] for annotation in annotations):
                covered[y : y + height, x : x + width] += 1
            assert covered.max() == 1
            count += len(annotations)
        assert count > 24

    def test_boxes_hold_the_digits(self, folder):
        """Drawn over black in any colour, what differs from black lies in and around the boxes."""
        from sklearn.datasets import load_digits

        module = run('digits2coco', '--out', folder, *self.small)
        digits = load_digits().images.astype(np.int64)
        black = [np.zeros((80, 80, 3), np.uint8)]
        picture, placed = module.compose(
            np.random.RandomState(1), black, digits, np.arange(1797), size=64
        )
        visible = picture.max(-1) > 0.7 * picture.max()
        inside = np.zeros((64, 64), bool)
        for _, (x, y, width, height) in placed:
            part = picture[y : y + height, x : x + width].max(-1) > 0
            assert part[0].any() and part[-1].any() and part[:, 0].any() and part[:, -1].any()
            inside[y : y + height, x : x + width] = True
        assert visible.any() and not (visible & ~inside).any()

    def test_is_reproducible_to_the_byte(self, folder, tmp_path):
        run('digits2coco', '--out', tmp_path / 'again', *self.small)
        assert files(tmp_path / 'again') == files(folder)

    def test_seed_changes_everything_and_the_number_of_pictures_nothing(self, folder, tmp_path):
        run('digits2coco', '--out', tmp_path / 'other', *self.small, '--seed', 1)
        run('digits2coco', '--out', tmp_path / 'fewer', '--train', 3, '--val', 1, '--size', 64)
        first, other, fewer = (files(f) for f in (folder, tmp_path / 'other', tmp_path / 'fewer'))
        assert not set(first.values()) & set(other.values())
        pictures = [name for name in fewer if name.endswith('.png')]
        assert len(pictures) == 4
        assert all(fewer[name] == first[name] for name in pictures)

    def test_a_complete_set_is_kept(self, folder, capsys):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
        run('digits2coco', '--out', folder, *self.small)
        assert 'complete already' in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in folder.rglob('*')} == before

    @pytest.mark.parametrize('lost', ['train/000002.png', 'annotations/val.json'])
    def test_a_half_finished_set_is_made_again(self, folder, lost):
        before = files(folder)
        (folder / lost).unlink()
        folder.with_name('set.partial').mkdir()
        run('digits2coco', '--out', folder, *self.small)
        assert files(folder) == before
        assert not folder.with_name('set.partial').exists()

    def test_other_parameters_replace_the_set(self, folder):
        run('digits2coco', '--out', folder, '--train', 2, '--val', 1, '--size', 48)
        assert len(files(folder)) == 5

    def test_foreign_data_are_never_replaced(self, tmp_path):
        (tmp_path / 'annotations').mkdir()
        (tmp_path / 'annotations' / 'train.json').write_text('{"info": {"description": "COCO"}}')
        with pytest.raises(SystemExit, match='holds something else'):
            run('digits2coco', '--out', tmp_path, *self.small)
        assert len(files(tmp_path)) == 1

    def test_a_link_is_kept_and_its_target_replaced(self, tmp_path):
        (tmp_path / 'disk').mkdir()
        link = tmp_path / 'digits'
        link.symlink_to(tmp_path / 'disk')
        for size in (32, 48):
            run('digits2coco', '--out', link, '--train', 1, '--val', 1, '--size', size)
            assert link.is_symlink()
            with Image.open(tmp_path / 'disk' / 'val' / '000001.png') as picture:
                assert picture.size == (size, size)

    @pytest.mark.parametrize(
        'content', ['[]', '{"images": [], "annotations": [], "categories": []}']
    )
    def test_foreign_sets_without_info(self, tmp_path, content):
        for split in ('train', 'val'):
            file = tmp_path / 'set' / 'annotations' / f'{split}.json'
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        with pytest.raises(SystemExit, match='holds something else'):
            run('digits2coco', '--out', tmp_path / 'set', *self.small)
        (tmp_path / 'file').touch()
        with pytest.raises(SystemExit, match='holds something else'):
            run('digits2coco', '--out', tmp_path / 'file', *self.small)

    @pytest.mark.parametrize(
        'option', [('--train', 0), ('--size', 8), ('--size', 999), ('--seed', -1)]
    )
    def test_options_out_of_range(self, tmp_path, option, capsys):
        with pytest.raises(SystemExit):
            run('digits2coco', '--out', tmp_path / 'set', *option)
        assert f'{option[0]} must be' in capsys.readouterr().err


def xml(*objects, filename='a.jpg'):
    parts = [
        f'<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{box[0]}</xmin>'
        f'<ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>'
        for name, box, difficult in objects
    ]
    return f'<annotation><filename>{filename}</filename>{"".join(parts)}</annotation>'


class TestVOC:
    @pytest.fixture
    def voc(self, tmp_path):
        """Two pictures of 40x30: good boxes in both, and in b one of each kind of bad ones."""
        root = tmp_path / 'voc'
        for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
            (root / folder).mkdir(parents=True)
        for stem in 'ab':
            Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(root / f'JPEGImages/{stem}.jpg')
        (root / 'Annotations/a.xml').write_text(
            xml(('dog', (5, 6, 15, 26), 0), ('cat', (1, 1, 40, 30), 1))
        )
        (root / 'Annotations/b.xml').write_text(
            xml(
                ('dog', (7, 7, 7, 7), 0),
                ('dog', (41, 2, 60, 9), 0),
                ('dog', (3, 3, 3.5, 9), 0),
                ('cat', (30, 20, 50, 29), 0),
                # Some annotation programs write the whole path.
                filename='/somewhere/else/b.jpg',
            )
        )
        (root / 'ImageSets/Main/train.txt').write_text('a\n')
        (root / 'ImageSets/Main/val.txt').write_text('b\n\n')
        (root / 'ImageSets/Main/dog_train.txt').write_text('a  1\nb -1\n')
        return root

    def test_content_by_hand(self, voc, capsys):
        run('voc2coco', voc)
        assert sorted(p.name for p in (voc / 'annotations').iterdir()) == ['train.json', 'val.json']
        # COCO's error analysis needs the supercategory.
        categories = [
            dict(id=1, name='cat', supercategory='cat'),
            dict(id=2, name='dog', supercategory='dog'),
        ]
        assert json.loads((voc / 'annotations/train.json').read_text()) == dict(
            images=[dict(id=1, file_name='a.jpg', width=40, height=30)],
            annotations=[
                dict(id=1, image_id=1, category_id=2, bbox=[5, 6, 10, 20], area=200, iscrowd=0),
                dict(id=2, image_id=1, category_id=1, bbox=[1, 1, 39, 29], area=1131, iscrowd=1),
            ],
            categories=categories,
        )
        val = json.loads((voc / 'annotations/val.json').read_text())
        assert [a['bbox'] for a in val['annotations']] == [[30, 20, 10, 9]]
        assert val['categories'] == categories
        out, err = capsys.readouterr()
        assert '3 boxes left out, 1 clipped' in out
        for box, reason in (
            ('[7.0, 7.0, 7.0, 7.0]', 'left out, no area'),
            ('[41.0, 2.0, 60.0, 9.0]', 'left out, outside'),
            ('[3.0, 3.0, 3.5, 9.0]', 'left out, less than one pixel'),
            ('[30.0, 20.0, 50.0, 29.0]', 'clipped to the picture of 40x30'),
        ):
            assert any(
                'Annotations/b.xml' in row and box in row and reason in row
                for row in err.splitlines()
            )

    def test_result_passes_the_check(self, voc):
        run('voc2coco', voc)
        ann_file = str(voc / 'annotations/val.json')
        assert check_coco(ann_file, str(voc / 'JPEGImages'), ['cat', 'dog'], decode=True) == []

    def test_strict_writes_nothing(self, voc):
        with pytest.raises(SystemExit, match='4 unusable boxes, nothing was written'):
            run('voc2coco', voc, '--strict')
        assert not (voc / 'annotations').exists()

    def test_classes_splits_and_folder_can_be_given(self, voc, tmp_path, capsys):
        out = tmp_path / 'out'
        run('voc2coco', voc, '--classes', 'dog', '--splits', 'train', '--out-dir', out)
        content = json.loads((out / 'train.json').read_text())
        assert content['categories'] == [dict(id=1, name='dog', supercategory='dog')]
        assert [a['category_id'] for a in content['annotations']] == [1]
        assert [path.name for path in out.iterdir()] == ['train.json']
        assert (
            'cat [1.0, 1.0, 40.0, 30.0]: left out, not one of the classes'
            in capsys.readouterr().err
        )

    def test_a_class_given_twice(self, voc, capsys):
        with pytest.raises(SystemExit):
            run('voc2coco', voc, '--classes', 'cat', 'dog', 'cat')
        assert '--classes names something twice: cat dog cat' in capsys.readouterr().err

    def test_all_unusable_pictures_are_named_at_once(self, voc):
        (voc / 'ImageSets/Main/val.txt').write_text('b\nb\nc\nd\n')
        (voc / 'JPEGImages/a.jpg').write_bytes(b'nothing')
        (voc / 'Annotations/b.xml').write_text('<annotation>')
        (voc / 'Annotations/d.xml').write_text(xml())
        with pytest.raises(SystemExit) as caught:
            run('voc2coco', voc)
        message = str(caught.value)
        for part in (
            'val.txt: b is listed 2 times',
            'a.jpg can not be decoded',
            'b.xml: broken XML',
            'c.xml is missing',
            'no picture for',
            '5 errors, nothing was written',
        ):
            assert part in message
        assert not (voc / 'annotations').exists()

    @pytest.mark.parametrize(
        'old, new, message',
        [
            ('<xmin>5</xmin>', '', 'object 1 has no bndbox of four numbers'),
            ('<xmin>5<', '<xmin>five<', 'object 1 has no bndbox of four numbers'),
            ('<xmin>5<', '<xmin>nan<', 'object 1 has no bndbox of four numbers'),
            ('<name>cat</name>', '', 'object 2 has no name'),
        ],
    )
    def test_broken_objects(self, voc, old, new, message):
        path = voc / 'Annotations/a.xml'
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(SystemExit, match=message):
            run('voc2coco', voc)

    def test_not_a_voc_folder(self, tmp_path, voc):
        with pytest.raises(SystemExit, match='is no Pascal VOC folder'):
            run('voc2coco', tmp_path)
        with pytest.raises(SystemExit, match=r"test.txt is missing, there are: \['dog_train'"):
            run('voc2coco', voc, '--splits', 'test')


class TestCheckTool:
    def test_lists_everything_and_fails(self, tmp_path, capsys):
        images = [dict(id=i, file_name=f'{i}.png', width=4, height=4) for i in (1, 2)]
        content = dict(images=images, annotations=[], categories=[dict(id=1, name='a')])
        (tmp_path / 'ann.json').write_text(json.dumps(content))
        with pytest.raises(SystemExit) as caught:
            run('check_coco', tmp_path / 'ann.json', tmp_path)
        out = capsys.readouterr().out
        assert caught.value.code == 1
        assert '1.png: No such file' in out and '2.png: No such file' in out
        assert '2 errors, 0 warnings' in out

    @pytest.mark.parametrize('pictures', [0, 1])
    def test_a_sound_set_passes_and_an_empty_one_does_not(self, tmp_path, capsys, pictures):
        image = dict(id=1, file_name='1.png', width=64, height=64)
        box = dict(id=1, image_id=1, category_id=1, bbox=[1, 1, 9, 9], area=81, iscrowd=0)
        content = dict(
            images=[image] * pictures,
            annotations=[box] * pictures,
            categories=[dict(id=1, name='a')],
        )
        (tmp_path / 'ann.json').write_text(json.dumps(content))
        (tmp_path / '1.png').write_bytes(b'there')
        with pytest.raises(SystemExit) as caught:
            run('check_coco', tmp_path / 'ann.json', tmp_path)
        assert caught.value.code == 1 - pictures
        assert ('the file lists no pictures' in capsys.readouterr().out) == (not pictures)


def test_blood_cells(shared_data, tmp_path, capsys):
    """The 364 real pictures, whose two boxes without area are known by file."""
    run('voc2coco', shared_data / 'bccd', '--out-dir', tmp_path)
    out, err = capsys.readouterr()
    assert '2 boxes left out, 0 clipped' in out
    assert 'BloodImage_00338.xml' in err and 'BloodImage_00343.xml' in err
    contents = {
        s: json.loads((tmp_path / f'{s}.json').read_text()) for s in ('train', 'val', 'test')
    }
    assert [len(c['images']) for c in contents.values()] == [205, 87, 72]
    assert sum(len(c['annotations']) for c in contents.values()) == 4886
    names = [{image['file_name'] for image in c['images']} for c in contents.values()]
    assert not any(a & b for a, b in combinations(names, 2))
