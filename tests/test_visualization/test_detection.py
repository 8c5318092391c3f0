import numpy as np
import pytest
import torch
from mmengine.structures import InstanceData

pytest.importorskip('mmdet')

from mmdet.structures import DetDataSample

from mmstepnet.registry import VISUALIZERS
from mmstepnet.visualization import detection
from mmstepnet.visualization.detection import EnlargingDetVisualizer


@pytest.fixture
def sample():
    boxes = torch.tensor([[4.0, 6.0, 12.0, 20.0]])
    labels = torch.tensor([1])
    sample = DetDataSample()
    sample.gt_instances = InstanceData(bboxes=boxes, labels=labels)
    sample.pred_instances = InstanceData(
        bboxes=boxes + 2, labels=labels, scores=torch.tensor([0.9])
    )
    return sample


@pytest.fixture
def visualizer():
    visualizer = EnlargingDetVisualizer(
        min_edge=100, min_font_size=6, bbox_color=(255, 0, 0), line_width=1, alpha=1.0
    )
    visualizer.dataset_meta = dict(classes=('0', '1'))
    return visualizer


def red(picture):
    """Columns and rows of the outermost pure red pixels: left, top, right, bottom."""
    rows, columns = np.nonzero((picture[..., 0] > 180) & (picture[..., 1:] < 80).all(-1))
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_enlarges_picture_and_boxes_by_a_whole_number(visualizer, sample):
    visualizer.add_datasample('x', np.zeros((24, 32, 3), np.uint8), sample, out_file=None)
    drawn = visualizer.get_image()
    assert drawn.shape == (96, 256, 3)
    truth, prediction = red(drawn[:, :128]), red(drawn[:, 128:])
    assert np.allclose(truth, [16, 24, 48, 80], atol=2)
    assert np.allclose(prediction, [24, 32, 56, 88], atol=2)


def test_leaves_sample_and_large_pictures_alone(visualizer, sample):
    before = sample.gt_instances.bboxes.clone()
    visualizer.add_datasample('x', np.zeros((24, 32, 3), np.uint8), sample)
    assert torch.equal(sample.gt_instances.bboxes, before)
    visualizer.add_datasample('x', np.zeros((80, 100, 3), np.uint8), sample, draw_gt=False)
    assert visualizer.get_image().shape == (80, 100, 3)


def test_writes_a_file_and_draws_without_a_sample(visualizer, tmp_path):
    visualizer.add_datasample(
        'x', np.zeros((50, 50, 3), np.uint8), out_file=str(tmp_path / 'x.png')
    )
    assert (tmp_path / 'x.png').is_file()
    assert visualizer.get_image().shape == (100, 100, 3)


def test_is_built_from_a_config():
    config = dict(type='mmstepnet.EnlargingDetVisualizer', min_edge=7, name='built')
    assert VISUALIZERS.build(config).min_edge == 7
    with pytest.raises(ValueError, match='min_edge must be at least 1, got 0'):
        EnlargingDetVisualizer(min_edge=0, name='refused')


@pytest.mark.parametrize('structure', [True, False])
def test_masks_grow_with_their_picture(visualizer, sample, structure):
    from mmdet.structures.mask import BitmapMasks

    mask = np.zeros((1, 24, 32), np.uint8)
    mask[:, 6:20, 4:12] = 1
    masks = BitmapMasks(mask, 24, 32) if structure else torch.from_numpy(mask).bool()
    instances = sample.gt_instances if structure else sample.pred_instances
    instances.masks = masks
    grown = detection._enlarge(sample, 4).get('gt_instances' if structure else 'pred_instances')
    grown = grown.masks.masks if structure else grown.masks.numpy()
    assert np.array_equal(grown, mask.repeat(4, 1).repeat(4, 2))
    visualizer.add_datasample('x', np.zeros((24, 32, 3), np.uint8), sample)


@pytest.mark.parametrize('batch', [1, 3])
def test_test_pictures_are_drawn_at_an_interval(monkeypatch, batch):
    drawn = []
    monkeypatch.setattr(
        detection.DetVisualizationHook,
        'after_test_iter',
        lambda self, runner, batch_idx, data_batch, outputs: drawn.extend(outputs),
    )
    monkeypatch.setattr(detection.DetVisualizationHook, '__init__', lambda self: None)
    hook = detection.IntervalDetVisualizationHook()
    hook.interval = 4
    for i in range(0, 9, batch):
        hook.after_test_iter(None, i, None, list(range(i, i + batch)))
    assert drawn == [0, 4, 8]
