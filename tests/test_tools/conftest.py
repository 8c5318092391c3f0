import contextlib
import itertools
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tests.tools import ROOT, TOOLS, load_tool


@pytest.fixture
def assert_ended():
    """Fails unless these processes end within some seconds."""

    def is_running(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.status() != psutil.STATUS_ZOMBIE
        return False

    def assert_ended(processes):
        # Data loaders' processes look every five seconds whether their parent is still there.
        end = time.monotonic() + 60
        while running := [process for process in processes if is_running(process)]:
            assert time.monotonic() < end, running
            time.sleep(0.05)

    return assert_ended


TOY_MODULE = '''
import os
import time

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS


@DATASETS.register_module()
class ToyData:
    """Two classes of vectors, with an augmentation that draws random numbers."""

    metainfo = dict(classes=('negative', 'positive'))

    def __init__(self, hanging_rank=None):
        self.hanging_rank = hanging_rank

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.hanging_rank is not None and os.environ['RANK'] == str(self.hanging_rank):
            time.sleep(1000)
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return dict(inputs=x + 0.1 * torch.randn(4), label=int(x.sum() > 0))


@MODELS.register_module()
class ToyModel(BaseModel):
    """Two linear layers with dropout."""

    def __init__(self, width=8):
        super().__init__()
        self.backbone = torch.nn.Linear(4, width)
        self.head = torch.nn.Linear(width, 2)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, inputs, label, mode='loss'):
        scores = self.head(self.dropout(self.backbone(inputs).relu()))
        if mode == 'loss':
            return dict(loss=torch.nn.functional.cross_entropy(scores, label))
        return [dict(right=bool(r)) for r in scores.argmax(1) == label]


@METRICS.register_module()
class ToyAccuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [sample['right'] for sample in data_samples]

    def compute_metrics(self, results):
        return dict(accuracy=sum(results) / len(results))
'''

TOY_CONFIG = """
custom_imports = dict(imports=['toy_module'], allow_failed_imports=False)
default_scope = 'mmengine'
model = dict(type='ToyModel')
train_dataloader = dict(
    dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    batch_size=2,
    num_workers=1,
    persistent_workers=True,
)
val_dataloader = dict(
    dataset=dict(type='ToyData'),
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    batch_size=2,
    num_workers=0,
)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type='ToyAccuracy')
train_cfg = dict(by_epoch=True, max_epochs=4)
val_cfg = test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
param_scheduler = dict(type='MultiStepLR', milestones=[2])
auto_scale_lr = dict(base_batch_size=1)
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1),
    checkpoint=dict(type='CheckpointHook', interval=1),
)
"""


CLASSIFIER = """
_base_ = ['mmpretrain::_base_/default_runtime.py']
custom_imports = dict(imports=['mmstepnet'], allow_failed_imports=False)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmstepnet.StepResNet',
        depth=18,
        base_channels=8,
        stem_channels=8,
        out_indices=(3,),
        plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))],
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=2, in_channels=64, topk=(1,)),
)
data_preprocessor = dict(num_classes=2, mean=[127.0] * 3, std=[60.0] * 3, to_rgb=True)
pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='CustomDataset', data_root='DATA', pipeline=pipeline),
)
val_dataloader = test_dataloader = dict(
    train_dataloader, sampler=dict(type='DefaultSampler', shuffle=False)
)
val_evaluator = test_evaluator = dict(type='Accuracy', topk=1)
train_cfg = dict(by_epoch=True, max_epochs=3)
val_cfg = test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
"""


class Toy:
    """A model, a data set and a config so small that a training run takes a moment."""

    def __init__(self, folder):
        folder.mkdir()
        (folder / 'toy_module.py').write_text(TOY_MODULE)
        self.config = folder / 'toy config.py'
        self.config.write_text(TOY_CONFIG)
        path = f'{folder}{os.pathsep}{ROOT}'
        self.env = {**os.environ, 'PYTHONPATH': path, 'PYTHON': sys.executable}
        self.counter = itertools.count()
        self.started: list[psutil.Process] = []
        sys.path.insert(0, str(folder))

    def call(self, monkeypatch, tool, *arguments):
        """Run a tool's ``main`` in this process."""
        # Runs that start in the same second would share MMEngine's message hub.
        name = f'experiment_name=toy_{next(self.counter)}'
        arguments = [str(argument) for argument in arguments]
        if '--cfg-options' in arguments:
            arguments.insert(arguments.index('--cfg-options') + 1, name)
        else:
            arguments += ['--cfg-options', name]
        monkeypatch.delenv('LOCAL_RANK', raising=False)
        monkeypatch.setattr(sys, 'argv', [tool, str(self.config), *arguments])
        load_tool(tool).main()

    def start(self, script, *arguments, **env):
        """Start a script of ``tools/`` as a process."""
        interpreter = 'bash' if script.endswith('.sh') else sys.executable
        process = subprocess.Popen(
            [interpreter, str(TOOLS / script), *map(str, arguments)],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(psutil.Process(process.pid))
        return process

    def stop(self):
        """End what a test has started and left running."""
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                for running in (process, *process.children(recursive=True)):
                    running.kill()
        self.started.clear()

    def run(self, script, *arguments, **env):
        """Run a script to its end: exit code and output."""
        process = self.start(script, *arguments, **env)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output


@pytest.fixture(name='load_tool')
def load_tool_fixture():
    """Import a script of ``tools/`` by its name, as a module."""
    return load_tool


@pytest.fixture(scope='session')
def toy_project(tmp_path_factory):
    return Toy(tmp_path_factory.mktemp('tools') / 'toy project')


@pytest.fixture
def toy(toy_project):
    yield toy_project
    toy_project.stop()


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    """Dark and light noise, 32x32, in class folders."""
    cv2 = pytest.importorskip('cv2')
    root = tmp_path_factory.mktemp('pictures')
    random = np.random.default_rng(0)
    for name, offset in (('dark', 0), ('light', 150)):
        (root / name).mkdir()
        for index in range(8):
            picture = random.integers(0, 100, (32, 32, 3)) + offset
            cv2.imwrite(str(root / name / f'{name}{index}.png'), picture.astype('uint8'))
    return root


@pytest.fixture
def classifier(pictures):
    """Text of a config: a small StepNet classifier of these pictures."""
    return CLASSIFIER.replace('DATA', str(pictures))
