"""A detector's AP and TNS on one process and on two, in training and by the test scripts."""

import pickle
import subprocess
import sys

import pytest
import torch

from mmstepnet.stiffness import read_report, read_samples
from tests.tools import ROOT, TOOLS

pytest.importorskip('mmcv.ops')
pytest.importorskip('mmdet')

# Trained on what it is tested on, so that AP is not 0 after a moment. Seven pictures: the second
# process gets one twice. One picture a batch: batches of other sizes would round differently.
CONFIG = """
_base_ = '{root}/configs/digits/faster_rcnn_r18_stepnet_digits.py'
data_root = '{data}/'
pictures = dict(
    data_root=data_root, ann_file='annotations/val.json', data_prefix=dict(img='val/')
)
model = dict(
    backbone=dict(base_channels=16),
    neck=dict(in_channels=[16, 32, 64, 128]),
)
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False, dataset=pictures
)
val_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False, dataset=pictures
)
test_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False, dataset=pictures
)
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator
param_scheduler = None
optim_wrapper = dict(optimizer=dict(lr=3e-3))
train_cfg = dict(max_epochs=40, val_interval=40)
default_hooks = dict(checkpoint=dict(interval=40, save_best=None))
custom_hooks = [
    dict(type='SyncBuffersHook'),
    dict(type='mmstepnet.StiffnessHook', exclude_first=False, figures=False),
]
visualizer = dict(vis_backends=[dict(type='LocalVisBackend')])
"""


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('seven pictures')
    data = folder / 'digits'
    command = [TOOLS / 'dataset_converters' / 'digits2coco.py', '--out', data]
    command += ['--train', 1, '--val', 7, '--size', 64]
    subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
    path = folder / 'config.py'
    path.write_text(CONFIG.format(root=ROOT, data=data))
    return path


@pytest.mark.slow
def test_ap_and_tns_on_one_process_and_on_two(toy, config, tmp_path):
    run = tmp_path / 'run'
    code, output = toy.run('dist_train.sh', config, 2, '--work-dir', run)
    assert code == 0, output
    reports, predictions = [run / 'stiffness' / 'epoch_40.json'], []
    for script, processes in (('test.py', ()), ('dist_test.sh', (2,))):
        work_dir, out = tmp_path / script, tmp_path / f'{script}.pkl'
        arguments = (config, run / 'epoch_40.pth', *processes)
        code, output = toy.run(script, *arguments, '--work-dir', work_dir, '--out', out)
        assert code == 0, output
        reports.append(work_dir / 'stiffness' / 'test.json')
        predictions.append(pickle.loads(out.read_bytes()))

    samples = [read_samples(path) for path in reports]
    reports = [read_report(path) for path in reports]
    assert reports[0]['metrics']['coco/bbox_mAP'] > 0.1
    for report, (nsi, dt) in zip(reports, samples, strict=True):
        assert report['metrics'] == reports[0]['metrics']
        assert report['tns'] == reports[0]['tns']
        assert report['num_samples'] == 7
        assert torch.equal(nsi, samples[0][0]) and torch.equal(dt, samples[0][1])
    one, two = predictions
    assert [picture['img_id'] for picture in one] == [picture['img_id'] for picture in two]
    assert len(one) == 7
    for first, second in zip(one, two, strict=True):
        first, second = first['pred_instances'], second['pred_instances']
        assert len(first['scores']) > 0
        assert all(torch.equal(first[key], second[key]) for key in ('bboxes', 'scores', 'labels'))
