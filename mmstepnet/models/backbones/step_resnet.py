"""ResNet whose residual step is a learned step size; without plugins, MMDetection's ResNet.

He et al.: Deep Residual Learning for Image Recognition, CVPR 2016,
https://arxiv.org/abs/1512.03385; Huang et al.: Understanding Self-attention Mechanism via Dynamical
System Perspective, ICCV 2023, https://arxiv.org/abs/2308.09939.
"""

import math
import warnings
from collections.abc import Sequence

from mmcv.cnn import build_conv_layer, build_norm_layer
from torch import Tensor, nn

from mmstepnet.models.layers.iebn import plain_norm_cfg
from mmstepnet.registry import MODELS

from .base import ResidualBackbone
from .blocks import BasicBlock, Bottleneck, Stage
from .plugins import resolve_plugins

ARCHITECTURES = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}

# What backbones are trained on before detection; it sets the map sizes of step sizes that ask.
_IMAGENET_SIZE = 224


@MODELS.register_module()
class StepResNet(ResidualBackbone):
    """ResNet for detectors and classifiers, with step sizes as plugins.

    Takes every argument of ``mmdet.ResNet`` and gives the same outputs bit for bit where no plugin
    is set. Parameter names are torchvision's; those of a step size stand under ``layerI.J.step.``,
    so that a plain ResNet's checkpoint loads with only these missing. Needs no compiled ops (but
    for ``dcn``).

    Args:
        depth: 18, 34, 50, 101 or 152.
        in_channels: Channels of the pictures.
        stem_channels: Channels of the stem, ``base_channels`` by default.
        base_channels: Width of the first stage's 3x3 convolutions; each further stage doubles it.
        num_stages: Number of stages, 1 to 4.
        strides: Stride of the first block of each stage.
        dilations: Dilation of each stage's 3x3 convolutions.
        out_indices: Stages whose output is returned.
        style: ``'pytorch'`` (the 3x3 convolution has the stride) or ``'caffe'`` (the first 1x1 has
            it).
        deep_stem: Three 3x3 convolutions instead of the 7x7.
        avg_down: Average pooling before an unstrided projection in the shortcut.
        frozen_stages: The stem (0) and this many stages are not trained; -1 freezes nothing. Step
            sizes without loaded weights are exempt.
        conv_cfg: Config of convolutions, None is ``Conv2d``.
        norm_cfg: Config of norms.
        norm_eval: Keep batch norms in evaluation mode during training, MMDetection's default. Step
            sizes without loaded weights are exempt. Set it to False to train from scratch.
        dcn: Config of deformable convolutions (bottleneck depths only).
        stage_with_dcn: Stages that get them.
        plugins: List of ``dict(cfg, position='residual_step', stages=None, blocks='all')``. ``cfg``
            is a step size (``dict(type='mmstepnet.StepNetAdaptor')``) or, at MMDetection's
            positions ``'after_conv1'``, ``'after_conv2'``, ``'after_conv3'``, a plugin layer.
            ``stages`` holds one bool a stage; ``blocks`` is ``'all'``, ``'identity'`` (blocks with
            an identity shortcut) or a list of lists of bools.
        with_cp: Recompute blocks in the backward pass to save memory.
        zero_init_residual: Start residual branches at 0.
        pretrained: Deprecated, use ``init_cfg``.
        init_cfg: As for MMEngine modules.

    Shape:
        - input: (N, in_channels, H, W)
        - returns: a tuple of the stages' outputs, the i-th (N, C_i, H / s_i, W / s_i) with strides
            s_i of
          4, 8, 16, 32 by default.

    Raises:
        ValueError: An argument out of its range, by name.

    Example:
        >>> import torch
        >>> from mmstepnet.models import StepResNet
        >>> model = StepResNet(18, plugins=[dict(cfg=dict(type='mmstepnet.StepNetAdaptor'))]).eval()
        >>> for level in model(torch.rand(1, 3, 32, 32)):
        ...     print(tuple(level.shape))
        (1, 64, 8, 8)
        (1, 128, 4, 4)
        (1, 256, 2, 2)
        (1, 512, 1, 1)
    """

    def __init__(
        self,
        depth: int,
        in_channels: int = 3,
        stem_channels: int | None = None,
        base_channels: int = 64,
        num_stages: int = 4,
        strides: Sequence[int] = (1, 2, 2, 2),
        dilations: Sequence[int] = (1, 1, 1, 1),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        style: str = 'pytorch',
        deep_stem: bool = False,
        avg_down: bool = False,
        frozen_stages: int = -1,
        conv_cfg: dict | None = None,
        norm_cfg: dict | None = None,
        norm_eval: bool = True,
        dcn: dict | None = None,
        stage_with_dcn: Sequence[bool] = (False, False, False, False),
        plugins: Sequence[dict] | None = None,
        with_cp: bool = False,
        zero_init_residual: bool = True,
        pretrained: str | None = None,
        init_cfg: dict | list[dict] | None = None,
    ):
        if pretrained is not None:
            if init_cfg is not None:
                raise ValueError('pretrained and init_cfg cannot both be given; use init_cfg')
            warnings.warn("pretrained is deprecated, use init_cfg=dict(type='Pretrained', ...)")
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        super().__init__(frozen_stages, norm_eval, zero_init_residual, init_cfg)
        if depth not in tuple(ARCHITECTURES):
            raise ValueError(
                f'depth must be one of {", ".join(map(str, ARCHITECTURES))}, got {depth!r}'
            )
        if num_stages not in (1, 2, 3, 4):
            raise ValueError(f'num_stages must be 1 to 4, got {num_stages!r}')
        per_stage = dict(strides=strides, dilations=dilations)
        if dcn is not None:
            per_stage.update(stage_with_dcn=stage_with_dcn)
        for name, value in per_stage.items():
            if len(value) != num_stages:
                raise ValueError(
                    f'{name} needs one entry for each of {num_stages} stages, got {value!r}'
                )
        if not out_indices or not all(0 <= i < num_stages for i in out_indices):
            raise ValueError(f'out_indices must lie in 0..{num_stages - 1}, got {out_indices!r}')
        if style not in ('pytorch', 'caffe'):
            raise ValueError(f"style must be 'pytorch' or 'caffe', got {style!r}")
        if not -1 <= frozen_stages <= num_stages:
            raise ValueError(f'frozen_stages must lie in -1..{num_stages}, got {frozen_stages!r}')

        self.depth = depth
        self.deep_stem = deep_stem
        self.out_indices = out_indices
        self.conv_cfg = conv_cfg
        self.norm_cfg = norm_cfg = norm_cfg or dict(type='BN', requires_grad=True)
        self.block, stage_blocks = ARCHITECTURES[depth]
        self.stage_blocks = stage_blocks[:num_stages]
        stem_channels = stem_channels or base_channels
        self._make_stem(in_channels, stem_channels)

        widths = [base_channels * 2**i for i in range(num_stages)]
        inputs = [stem_channels, *(width * self.block.expansion for width in widths)]
        projected = [
            strides[i] != 1 or inputs[i] != widths[i] * self.block.expansion
            for i in range(num_stages)
        ]
        block_plugins = resolve_plugins(
            plugins,
            [
                [j > 0 or not projected[i] for j in range(num_blocks)]
                for i, num_blocks in enumerate(self.stage_blocks)
            ],
            self.block.positions,
            map_sizes=[
                _IMAGENET_SIZE // (4 * math.prod(strides[: i + 1])) for i in range(num_stages)
            ],
        )
        self.res_layers = []
        for i, num_blocks in enumerate(self.stage_blocks):
            out_channels = widths[i] * self.block.expansion
            blocks = []
            for j in range(num_blocks):
                first = j == 0
                shortcut = None
                if first and projected[i]:
                    shortcut = self._make_shortcut(inputs[i], out_channels, strides[i], avg_down)
                blocks.append(
                    self.block(
                        inplanes=inputs[i] if first else out_channels,
                        planes=widths[i],
                        stride=strides[i] if first else 1,
                        dilation=dilations[i],
                        downsample=shortcut,
                        style=style,
                        with_cp=with_cp,
                        conv_cfg=conv_cfg,
                        norm_cfg=norm_cfg,
                        dcn=dcn if dcn is not None and stage_with_dcn[i] else None,
                        plugins=block_plugins[i][j],
                    )
                )
            self.res_layers.append(f'layer{i + 1}')
            self.add_module(self.res_layers[-1], Stage(*blocks))
        self.feat_dim = inputs[-1]
        self._freeze_stages()
        self._peek_pretrained()

    @property
    def norm1(self) -> nn.Module:
        return getattr(self, self.norm1_name)

    def _make_stem(self, in_channels: int, out_channels: int) -> None:
        if self.deep_stem:
            half = out_channels // 2
            layers = []
            for c_in, c_out, stride in (
                (in_channels, half, 2),
                (half, half, 1),
                (half, out_channels, 1),
            ):
                conv = build_conv_layer(
                    self.conv_cfg, c_in, c_out, 3, stride, padding=1, bias=False
                )
                norm = build_norm_layer(self.norm_cfg, c_out)[1]
                layers += [conv, norm, nn.ReLU(inplace=True)]
            self.stem = nn.Sequential(*layers)
        else:
            self.conv1 = build_conv_layer(
                self.conv_cfg, in_channels, out_channels, 7, stride=2, padding=3, bias=False
            )
            self.norm1_name, norm1 = build_norm_layer(self.norm_cfg, out_channels, postfix=1)
            self.add_module(self.norm1_name, norm1)
            self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def _make_shortcut(
        self, in_channels: int, out_channels: int, stride: int, avg_down: bool
    ) -> nn.Sequential:
        layers = []
        if avg_down:
            layers.append(nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False))
            stride = 1
        layers += [
            build_conv_layer(self.conv_cfg, in_channels, out_channels, 1, stride, bias=False),
            build_norm_layer(plain_norm_cfg(self.norm_cfg), out_channels)[1],
        ]
        return nn.Sequential(*layers)

    def _stem_modules(self) -> list[nn.Module]:
        return [self.stem] if self.deep_stem else [self.conv1, self.norm1]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x) if self.deep_stem else self.relu(self.norm1(self.conv1(x)))
        x = self.maxpool(x)
        outputs = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_indices:
                outputs.append(x)
        return tuple(outputs)
