"""The ResNets for small pictures: three stages, 16, 32 and 64 wide, depth 9n + 2 or 6n + 2.

He et al.: Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2,
https://arxiv.org/abs/1512.03385, and Identity Mappings in Deep Residual Networks, ECCV 2016,
https://arxiv.org/abs/1603.05027.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from mmcv.cnn import build_conv_layer, build_norm_layer
from torch import Tensor, nn

from mmstepnet.models.layers.iebn import plain_norm_cfg
from mmstepnet.registry import MODELS

from .base import ResidualBackbone
from .blocks import BasicBlock, Bottleneck, ResidualBlock, Stage
from .plugins import STEP_POSITION, BlockPlugins, resolve_plugins

_STRIDES = (1, 2, 2)


class PadShortcut(nn.Module):
    """Shortcut without parameters, option A of He et al.: take every ``stride``-th position, pad
    channels of zeros.

    The zeros go before and after the given channels in equal parts, one more after them where the
    number is odd.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, at least ``in_channels``.
        stride: Distance of the positions taken.

    Shape:
        - x: (N, in_channels, H, W)
        - returns: (N, out_channels, ceil(H / stride), ceil(W / stride))

    Raises:
        ValueError: ``out_channels`` is below ``in_channels``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int):
        super().__init__()
        missing = out_channels - in_channels
        if missing < 0:
            raise ValueError(
                f"shortcut='pad' can only add channels, but a stage goes from {in_channels} to "
                f'{out_channels}; give widths that do not shrink'
            )
        self.stride = stride
        self.padding = (missing // 2, missing - missing // 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, *self.padding))

    def extra_repr(self) -> str:
        return f'stride={self.stride}, padding={self.padding}'


class PreActBlock(ResidualBlock):
    """Norm and ReLU before each convolution and nothing after the sum.

    With a projection both branches start from the activated input, as the authors' code has it;
    then the state x_t is the projection of that.

    Args:
        inplanes: Channels of the input.
        planes: Width of the 3x3 convolutions.
        stride: Of the first 3x3 convolution.
        downsample: The shortcut where it is not the identity.
        with_cp: Recompute the block in the backward pass.
        conv_cfg: Config of convolutions.
        norm_cfg: Config of norms.
        plugins: What this block gets.
    """

    kernel_sizes: tuple[int, ...]

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        with_cp: bool = False,
        conv_cfg: dict | None = None,
        norm_cfg: dict | None = None,
        plugins: BlockPlugins | None = None,
    ):
        super().__init__()
        norm_cfg = norm_cfg or dict(type='BN')
        count = len(self.kernel_sizes)
        widths = [inplanes, *[planes] * (count - 1), planes * self.expansion]
        self.layer_names = []
        for i, kernel_size in enumerate(self.kernel_sizes):
            norm_name, norm = build_norm_layer(norm_cfg, widths[i], postfix=i + 1)
            conv = build_conv_layer(
                conv_cfg,
                widths[i],
                widths[i + 1],
                kernel_size,
                stride if i == self.strided else 1,
                padding=kernel_size // 2,
                bias=False,
            )
            self.add_module(norm_name, norm)
            self.add_module(f'conv{i + 1}', conv)
            self.layer_names.append((norm_name, f'conv{i + 1}'))
        channels = {f'after_conv{i + 1}': widths[i + 1] for i in range(count)}
        channels = {**channels, STEP_POSITION: widths[-1]}
        self._finish(downsample, with_cp, channels, plugins, activation=False)

    def _activate(self, x: Tensor) -> Tensor:
        return self.relu(getattr(self, self.layer_names[0][0])(x))

    def residual(self, x: Tensor) -> Tensor:
        """The residual branch f from its activated input."""
        for i, (norm_name, conv_name) in enumerate(self.layer_names):
            if i > 0:
                x = self.relu(getattr(self, norm_name)(x))
            x = getattr(self, conv_name)(x)
            x = self._apply_plugins(x, f'after_{conv_name}')
        return x

    def fold_norms(self) -> None:
        # A plugin layer stands between a convolution and the next norm.
        if not self.plugin_names:
            super().fold_norms()

    def _forward(self, x: Tensor, memory: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        activated = self._activate(x)
        identity = x if self.downsample is None else self.downsample(activated)
        return self.step(identity, self.residual(activated), memory)


class PreActBasicBlock(PreActBlock):
    """Two 3x3 convolutions, pre-activated."""

    expansion = 1
    kernel_sizes = (3, 3)
    strided = 0
    positions = BasicBlock.positions


class PreActBottleneck(PreActBlock):
    """1x1, 3x3, 1x1 convolutions, pre-activated."""

    expansion = 4
    kernel_sizes = (1, 3, 1)
    strided = 1
    positions = Bottleneck.positions


_BLOCKS = {
    ('bottleneck', False): Bottleneck,
    ('bottleneck', True): PreActBottleneck,
    ('basic', False): BasicBlock,
    ('basic', True): PreActBasicBlock,
}
_CONVS_PER_BLOCK = {'bottleneck': 3, 'basic': 2}


@MODELS.register_module()
class StepResNetCifar(ResidualBackbone):
    """ResNet for pictures of about 32 x 32, with step sizes as plugins.

    A 3x3 stem, then three stages of n blocks each; the second and third halve the resolution. The
    original family is ``block='basic'`` with depth 20, 32, 44, 56, 110; the papers on step sizes
    use the bottleneck of depth 164.

    Args:
        depth: 9n + 2 for bottlenecks, 6n + 2 for basic blocks.
        block: ``'bottleneck'`` or ``'basic'``.
        pre_activation: Norm and ReLU before each convolution instead of after it, and a last norm
            and ReLU behind the third stage.
        in_channels: Channels of the pictures.
        widths: Width of the three stages' 3x3 convolutions; the stem has the first.
        shortcut: ``'projection'`` (1x1 convolution and norm; without norm when pre-activated) or
            ``'pad'`` (subsample and pad channels of zeros, no parameters), wherever a block changes
            the shape.
        plugins: As for :class:`StepResNet`, with three stages.
        out_indices: Stages whose output is returned.
        map_size: Side of the training pictures. It changes nothing but the default of step sizes
            that depend on it (:class:`~mmstepnet.models.step_sizes.FCA`).
        conv_cfg: Config of convolutions, None is ``Conv2d``.
        norm_cfg: Config of norms, None is ``BN``.
        frozen_stages: The stem (0) and this many stages are not trained; -1 freezes nothing. Step
            sizes without loaded weights are exempt.
        norm_eval: Keep batch norms in evaluation mode during training. Step sizes without loaded
            weights are exempt.
        with_cp: Recompute blocks in the backward pass to save memory.
        zero_init_residual: Start residual branches at 0. Needs a norm before the sum, which
            pre-activated blocks have not.
        init_cfg: As for MMEngine modules; by default Kaiming for convolutions and 1 for norms.

    Shape:
        - input: (N, in_channels, H, W)
        - returns: a tuple of the stages' outputs at ``out_indices``, with strides 1, 2, 4

    Raises:
        ValueError: An argument out of its range, by name.

    Example:
        >>> import torch
        >>> from mmstepnet.models import StepResNetCifar
        >>> adaptor = dict(cfg=dict(type='mmstepnet.StepNetAdaptor'), blocks='identity')
        >>> model = StepResNetCifar(depth=29, plugins=[adaptor]).eval()
        >>> model(torch.rand(1, 3, 32, 32))[0].shape
        torch.Size([1, 256, 8, 8])
    """

    def __init__(
        self,
        depth: int = 164,
        block: str = 'bottleneck',
        pre_activation: bool = False,
        in_channels: int = 3,
        widths: Sequence[int] = (16, 32, 64),
        shortcut: str = 'projection',
        plugins: Sequence[dict] | None = None,
        out_indices: Sequence[int] = (2,),
        map_size: int = 32,
        conv_cfg: dict | None = None,
        norm_cfg: dict | None = None,
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        zero_init_residual: bool = False,
        init_cfg: dict | list[dict] | None = None,
    ):
        super().__init__(frozen_stages, norm_eval, zero_init_residual, init_cfg)
        if block not in _CONVS_PER_BLOCK:
            raise ValueError(f"block must be 'bottleneck' or 'basic', got {block!r}")
        per_block = 3 * _CONVS_PER_BLOCK[block]
        is_int = isinstance(depth, int) and not isinstance(depth, bool)
        if not is_int or depth < per_block + 2 or (depth - 2) % per_block:
            raise ValueError(
                f'depth must be {per_block}n + 2 with n >= 1 for block={block!r} '
                f'({", ".join(str(per_block * n + 2) for n in (1, 2, 3))}, ...), got {depth!r}'
            )
        if len(widths) != 3 or not all(isinstance(w, int) and w > 0 for w in widths):
            raise ValueError(f'widths must be three positive ints, got {widths!r}')
        if shortcut not in ('projection', 'pad'):
            raise ValueError(f"shortcut must be 'projection' or 'pad', got {shortcut!r}")
        if not out_indices or not all(0 <= i < 3 for i in out_indices):
            raise ValueError(f'out_indices must lie in 0..2, got {out_indices!r}')
        if not -1 <= frozen_stages <= 3:
            raise ValueError(f'frozen_stages must lie in -1..3, got {frozen_stages!r}')
        if pre_activation and zero_init_residual:
            raise ValueError(
                'zero_init_residual=True needs a norm before the sum, but pre_activation=True has '
                'none there; set one of them to False'
            )

        self.depth = depth
        self.out_indices = out_indices
        self.pre_activation = pre_activation
        self.shortcut = shortcut
        self.conv_cfg = conv_cfg
        self.norm_cfg = norm_cfg = norm_cfg or dict(type='BN')
        self.block = _BLOCKS[block, pre_activation]
        num_blocks = (depth - 2) // per_block

        self.conv1 = build_conv_layer(conv_cfg, in_channels, widths[0], 3, padding=1, bias=False)
        outputs = [width * self.block.expansion for width in widths]
        last_width = outputs[-1] if pre_activation else widths[0]
        self.norm1_name, norm = build_norm_layer(
            norm_cfg, last_width, postfix='_last' if pre_activation else 1
        )
        if not pre_activation:
            self.add_module(self.norm1_name, norm)
        self.relu = nn.ReLU(inplace=True)

        inputs = [widths[0], *outputs[:-1]]
        changes = [_STRIDES[i] != 1 or inputs[i] != outputs[i] for i in range(3)]
        block_plugins = resolve_plugins(
            plugins,
            [[j > 0 or not change for j in range(num_blocks)] for change in changes],
            self.block.positions,
            map_sizes=[map_size, map_size // 2, map_size // 4],
        )
        self.res_layers = []
        for i in range(3):
            blocks = []
            for j in range(num_blocks):
                first = j == 0
                blocks.append(
                    self.block(
                        inplanes=inputs[i] if first else outputs[i],
                        planes=widths[i],
                        stride=_STRIDES[i] if first else 1,
                        downsample=self._make_shortcut(inputs[i], outputs[i], _STRIDES[i])
                        if first and changes[i]
                        else None,
                        with_cp=with_cp,
                        conv_cfg=conv_cfg,
                        norm_cfg=norm_cfg,
                        plugins=block_plugins[i][j],
                    )
                )
            self.res_layers.append(f'layer{i + 1}')
            self.add_module(self.res_layers[-1], Stage(*blocks))
        if pre_activation:
            self.add_module(self.norm1_name, norm)
        self.feat_dim = outputs[-1]
        self._freeze_stages()
        self._peek_pretrained()

    @property
    def norm1(self) -> nn.Module:
        """The stem's norm; when pre-activated the one behind the third stage."""
        return getattr(self, self.norm1_name)

    def _make_shortcut(self, in_channels: int, out_channels: int, stride: int) -> nn.Module:
        if self.shortcut == 'pad':
            return PadShortcut(in_channels, out_channels, stride)
        conv = build_conv_layer(self.conv_cfg, in_channels, out_channels, 1, stride, bias=False)
        if self.pre_activation:
            return nn.Sequential(conv)
        return nn.Sequential(conv, build_norm_layer(plain_norm_cfg(self.norm_cfg), out_channels)[1])

    def _stem_modules(self) -> list[nn.Module]:
        return [self.conv1] if self.pre_activation else [self.conv1, self.norm1]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.conv1(x)
        if not self.pre_activation:
            x = self.relu(self.norm1(x))
        outputs = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_indices:
                last = self.pre_activation and i == 2
                outputs.append(self.relu(self.norm1(x)) if last else x)
        return tuple(outputs)
