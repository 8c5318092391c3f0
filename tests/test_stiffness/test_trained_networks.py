"""Published CIFAR ResNets: our backbone and torchvision blocks have the same stiffness."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.resnet import BasicBlock

from mmstepnet.stiffness import TrajectoryRecorder

DATA = Path(
    os.environ.get('MMSTEPNET_SHARED_DATA', Path(__file__).parents[2].parent / 'shared' / 'data')
)


class PadShortcut(nn.Module):
    """Option A of He et al.: every second position, missing channels are zero."""

    def forward(self, x):
        extra = x.shape[1] // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))


class PlainResNet(nn.Module):
    """Torchvision's blocks on the three stages of the CIFAR networks."""

    def __init__(self, blocks):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for i, (c_in, c_out) in enumerate(pairwise(widths), 1):
            first = (c_in, c_out) if c_in == c_out else (c_in, c_out, 2, PadShortcut())
            layers = [BasicBlock(*first), *(BasicBlock(c_out, c_out) for _ in range(blocks - 1))]
            self.add_module(f'layer{i}', nn.Sequential(*layers))
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def pictures(count):
    cv2 = pytest.importorskip('cv2')
    pack = np.load(DATA / 'cifar10_jpeg.npz')
    data, offsets = pack['test_jpeg'], pack['test_offsets'][: count + 1]
    x = np.stack([cv2.imdecode(data[a:b], cv2.IMREAD_COLOR_RGB) for a, b in pairwise(offsets)])
    x = torch.from_numpy(x).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    return (x - mean) / std


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / 'resnet_cifar10').is_dir(), reason='needs the shared data')
@pytest.mark.parametrize(
    'file, depth', [('resnet20-12fca82f.th', 20), ('resnet56-4bfd9763.th', 56)]
)
def test_plain_module_and_backbone_agree(file, depth):
    from mmstepnet.models import StepResNetCifar
    from mmstepnet.utils.resnet_weights import convert_resnet

    state = torch.load(DATA / 'resnet_cifar10' / file, map_location='cpu')['state_dict']
    plain = PlainResNet((depth - 2) // 6).eval()
    plain.load_state_dict({key.removeprefix('module.'): value for key, value in state.items()})
    converted, backbone = convert_resnet(state)
    backbone.pop('type')
    ours = StepResNetCifar(**backbone).eval()
    prefix = 'backbone.'
    ours.load_state_dict(
        {k.removeprefix(prefix): v for k, v in converted.items() if k.startswith(prefix)}
    )
    x = pictures(200)
    nsi = []
    for model in (plain, ours):
        with TrajectoryRecorder(model) as record, torch.no_grad():
            for batch in x.split(100):
                model(batch)
        nsi.append(record.nsi)
    assert nsi[0].shape == (200, depth // 2 - 4)
    torch.testing.assert_close(nsi[0], nsi[1], rtol=1e-6, atol=0)
