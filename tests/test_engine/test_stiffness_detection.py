import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch.utils.data import Dataset

import mmstepnet  # noqa: F401
from mmstepnet.stiffness import TrajectoryRecorder, read_samples

mmdet = pytest.importorskip('mmdet')


class Pictures(Dataset):
    """Pictures of three sizes, so that a batch has to be padded."""

    metainfo = dict(classes=('thing',))
    sizes = ((64, 64), (48, 64), (64, 32), (64, 64), (32, 32))

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        from mmdet.structures import DetDataSample

        height, width = self.sizes[index]
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
        sample = DetDataSample(
            metainfo=dict(
                img_id=index,
                img_shape=(height, width),
                ori_shape=(height, width),
                scale_factor=(1.0, 1.0),
            )
        )
        return dict(inputs=image, data_samples=sample)


@pytest.mark.slow
@pytest.mark.smoke
def test_a_detector_is_measured_at_its_backbone(tmp_path):
    init_default_scope('mmdet')
    loader = torch.utils.data.DataLoader(
        Pictures(),
        batch_size=2,
        collate_fn=lambda batch: {k: [b[k] for b in batch] for k in batch[0]},
    )
    backbone = dict(
        type='mmstepnet.StepResNet',
        depth=18,
        base_channels=8,
        stem_channels=8,
        norm_eval=False,
        frozen_stages=-1,
        plugins=[
            dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), blocks='all', position='residual_step')
        ],
    )
    model = dict(
        type='RetinaNet',
        data_preprocessor=dict(
            type='DetDataPreprocessor', mean=[128.0] * 3, std=[64.0] * 3, pad_size_divisor=32
        ),
        backbone=backbone,
        neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=8, num_outs=5),
        bbox_head=dict(
            type='RetinaHead',
            num_classes=1,
            in_channels=8,
            feat_channels=8,
            stacked_convs=1,
            anchor_generator=dict(
                type='AnchorGenerator',
                octave_base_scale=4,
                scales_per_octave=1,
                ratios=[1.0],
                strides=[8, 16, 32, 64, 128],
            ),
        ),
        test_cfg=dict(
            nms_pre=20,
            min_bbox_size=0,
            score_thr=0.5,
            nms=dict(type='nms', iou_threshold=0.5),
            max_per_img=5,
        ),
    )
    runner = Runner(
        model=ConfigDict(model),
        work_dir=str(tmp_path),
        test_dataloader=loader,
        test_cfg=dict(),
        test_evaluator=dict(type='mmstepnet.StiffnessMetric', exclude_first=False),
        custom_hooks=[dict(type='mmstepnet.StiffnessHook', figures=False)],
        default_scope='mmdet',
        experiment_name='detection',
        log_level='WARNING',
        cfg=Config(),
    )
    for name, parameter in runner.model.named_parameters():
        if '.step.' in name or '.bn' in name:
            torch.nn.init.normal_(parameter)
    metrics = runner.test()
    nsi, dt = read_samples(tmp_path / 'stiffness' / 'test.json')
    assert nsi.shape == dt.shape == (5, 8) and metrics['stiffness/tns'] > 0

    record = TrajectoryRecorder(runner.model.backbone, exclude_first=False)
    with torch.no_grad():
        for batch in loader:
            batch = runner.model.data_preprocessor(batch)
            with record:
                runner.model.backbone(batch['inputs'])
    torch.testing.assert_close(nsi, record.nsi, rtol=1e-6, atol=0)
    torch.testing.assert_close(dt, record.dt, rtol=1e-6, atol=0)
