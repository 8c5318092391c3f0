"""Whole detectors on two ranks and in one process: losses, gradients, statistics."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from torch import nn

from mmstepnet.models.step_sizes.pooled_norm import PooledBatchNorm
from mmstepnet.models.step_sizes.stepnet import INPUTS
from mmstepnet.models.step_sizes.stepnet_ablation import VARIANTS
from mmstepnet.registry import MODELS
from tests.ranks import run_ranks

pytest.importorskip('mmdet')

CONFIG = Path(__file__).parents[2] / 'configs/_base_/models/faster_rcnn_r18_narrow.py'
SIZE = 64


@MODELS.register_module()
class SyncedNorm(PooledBatchNorm):
    """Batch norm over pixels and ranks, since torch's SyncBatchNorm takes no CPU tensors."""

    def forward(self, x):
        pixels = x.movedim(1, -1)
        return super().forward(pixels.flatten(0, 2)).view(pixels.shape).movedim(-1, 1)


def detector(step_size, dtype=torch.float64, **backbone):
    """The narrow Faster R-CNN, narrower still, where it does not matter who sees which picture.

    Three things in which ranks differ from one process are MMDetection's, and are settled here.
    Samplers draw at random: these take everything. Losses are divided by the number of samples of
    a process: every picture brings the same number, since no anchor is neither positive nor
    negative, all proposals are kept, and the objects themselves are no proposals. Proposals chosen
    by score could be others after rounding: none is left out.
    """
    cfg = Config.fromfile(CONFIG)
    base = dict(frozen_stages=1, norm_eval=True, base_channels=16, plugins=[dict(cfg=step_size)])
    everything = dict(num=10**6, add_gt_as_proposals=False)
    cfg.merge_from_dict(
        {
            'model.backbone': base | backbone,
            'model.neck': dict(in_channels=[16, 32, 64, 128], out_channels=16),
            'model.rpn_head': dict(in_channels=16, feat_channels=16),
            'model.roi_head.bbox_roi_extractor.out_channels': 16,
            'model.roi_head.bbox_head': dict(in_channels=16, fc_out_channels=32, num_classes=3),
            'model.train_cfg.rpn': dict(assigner=dict(neg_iou_thr=0.7), sampler=everything),
            'model.train_cfg.rpn_proposal': dict(
                nms_pre=-1, nms=None, max_per_img=10**6, min_bbox_size=-1
            ),
            'model.train_cfg.rcnn.sampler': everything,
        }
    )
    init_default_scope('mmdet')
    torch.manual_seed(1)
    model = MODELS.build(cfg.model)
    model.init_weights()
    for step in model.backbone.steps().values():
        for parameter in step.step_size.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).train()


def batch(objects):
    """One picture for each number of objects, as a data loader hands them over."""
    from mmdet.structures import DetDataSample

    random = np.random.default_rng(0)
    pictures, samples = [], []
    for count in objects:
        pictures.append(torch.from_numpy(random.integers(0, 256, (3, SIZE, SIZE), np.uint8)))
        corner, edge = random.uniform(0, 24, (count, 2)), random.uniform(14, 40, (count, 2))
        samples.append(DetDataSample(metainfo=dict(img_shape=(SIZE, SIZE))))
        samples[-1].gt_instances = InstanceData(
            bboxes=torch.from_numpy(np.concatenate((corner, corner + edge), 1)).float(),
            labels=torch.from_numpy(random.integers(0, 3, count)),
        )
    return dict(inputs=pictures, data_samples=samples)


def train(model, data, steps):
    """What MMEngine's ``train_step`` does, with plain descent.

    Returns:
        Losses and gradients of each step, and the statistics at the end.
    """
    trained = getattr(model, 'module', model)
    losses, gradients = {}, {}
    for step in range(steps):
        model.zero_grad()
        inputs = trained.data_preprocessor(data, training=True)
        inputs['inputs'] = inputs['inputs'].to(next(model.parameters()))
        loss, logged = trained.parse_losses(model._run_forward(inputs, mode='loss'))
        loss.backward()
        losses |= {f'{name} {step}': value.detach() for name, value in logged.items()}
        for name, parameter in trained.named_parameters():
            if parameter.grad is not None:
                gradients[f'{name} {step}'] = parameter.grad.clone()
                parameter.data -= 0.01 * parameter.grad
    statistics = {name: value for name, value in trained.named_buffers() if 'running' in name}
    return losses, gradients, statistics


def train_shares(rank):
    from mmengine.model import MMDistributedDataParallel

    results = {}
    for name, (model, objects, steps) in CASES.items():
        half = len(objects) // 2
        data = {key: value[rank * half :][:half] for key, value in batch(objects).items()}
        wrapped = MMDistributedDataParallel(detector(**model), broadcast_buffers=False)
        results[name] = train(wrapped, data, steps)
    return results


def step_size(kind, **kwargs):
    return dict(step_size=dict(type=f'mmstepnet.{kind}', **kwargs))


STEPNET = step_size('StepNetAdaptor')
FROM_SCRATCH = dict(norm_cfg=dict(type='mmstepnet.SyncedNorm'), norm_eval=False, frozen_stages=-1)
OBJECTS = (2, 1, 3, 1, 1, 2, 1, 4)
# Detector, number of objects on each picture, number of steps.
CASES = {
    'fine-tuned': (STEPNET, OBJECTS, 2),
    'from scratch': (STEPNET | FROM_SCRATCH, OBJECTS, 2),
    'single precision': (STEPNET | dict(dtype=torch.float32), OBJECTS, 1),
    'IEBN': (STEPNET | dict(norm_cfg=dict(type='mmstepnet.IEBN')), OBJECTS[:4], 1),
    'a rank without objects': (STEPNET, (2, 1, 0, 0), 3),
    'CBAM': (step_size('CBAM', reduction=4), OBJECTS[:4], 1),
}
STEP_SIZES = {
    **{f'StepNetAdaptor {i}': step_size('StepNetAdaptor', inputs=i) for i in INPUTS},
    **{f'StepNetAblation {v}': step_size('StepNetAblation', variant=v) for v in VARIANTS},
    **{kind: step_size(kind) for kind in ('DIA', 'ECA', 'IE', 'SRM')},
    **{kind: step_size(kind, reduction=4) for kind in ('FCA', 'SEM', 'SqueezeExcitation')},
    'SGE': step_size('SGE', groups=8),
}
# On each rank CBAM's spatial norm has statistics of its own, as a trunk's plain batch norm has. And
# MMDetection counts a picture without positives as if it had one.
UNEQUAL = ('CBAM', 'a rank without objects')
CASES.update({name: (model, OBJECTS[:4], 1) for name, model in STEP_SIZES.items()})


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    """Every case trained on two ranks: case -> one result a rank."""
    folder = tmp_path_factory.mktemp('ranks')
    results = run_ranks(train_shares, 2, folder)
    return {name: [result[name] for result in results] for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_every_parameter_gets_its_gradient(ranks, case):
    model, _, steps = CASES[case]
    trained = [n for n, p in detector(**model).named_parameters() if p.requires_grad]
    assert any('layer1.0.step.step_size' in name for name in trained)
    first, second = (gradients for _, gradients, _ in ranks[case])
    assert list(first) == [f'{name} {step}' for step in range(steps) for name in trained]
    assert first.keys() == second.keys()
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), name
        assert 0 < gradient.norm() < torch.inf, name


def distance(found, expected):
    """Norm of the difference, relative."""
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize('case', [case for case in CASES if case not in UNEQUAL])
def test_two_ranks_train_as_one_process(ranks, case):
    model, objects, steps = CASES[case]
    model = detector(**model)
    losses, gradients, statistics = train(model, batch(objects), steps)
    # In float64 MMDetection's own 1e-7, which it adds to the number of samples, is left. In float32
    # the largest difference, 7e-5, is in weights in front of a batch norm, whose gradients cancel.
    tolerance = 1e-9 if next(model.parameters()).dtype == torch.float64 else 1e-3
    first, second = ranks[case]
    for name, value in losses.items():
        assert distance((first[0][name] + second[0][name]) / 2, value) < 1e-6, name
    for result in first, second:
        for expected, found in zip((gradients, statistics), result[1:], strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                found_all_zero = not value.any() and not found[name].any()
                assert found_all_zero or distance(found[name], value) < tolerance, name
