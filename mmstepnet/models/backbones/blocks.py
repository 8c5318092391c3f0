"""The residual blocks of He et al., each ending in a :class:`ResidualStep`.

Deep Residual Learning for Image Recognition, CVPR 2016, https://arxiv.org/abs/1512.03385.
"""

from contextlib import nullcontext

import torch
from mmcv.cnn import (
    ConvAWS2d,
    ConvModule,
    ConvWS2d,
    build_conv_layer,
    build_norm_layer,
    build_plugin_layer,
    fuse_conv_bn,
)
from mmengine.model import BaseModule, Sequential
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmstepnet.models.layers.fused_step import has_hooks
from mmstepnet.models.layers.residual_step import ResidualStep, plain_steps
from mmstepnet.registry import MODELS

from .plugins import STEP_POSITION, BlockPlugins


class ResidualBlock(BaseModule):
    """``relu(shortcut(x) + residual(x) * dt)``; a subclass builds the layers of ``residual``."""

    expansion: int
    positions: tuple[str, ...]
    last_position: str

    def _finish(
        self,
        downsample: nn.Module | None,
        with_cp: bool,
        channels: dict[str, int],
        plugins: BlockPlugins | None,
        activation: bool = True,
    ) -> None:
        """Add what follows the layers of the residual branch, in MMDetection's order of keys.

        Args:
            downsample: The shortcut where it is not the identity.
            with_cp: Recompute the block in the backward pass instead of keeping its activations.
            channels: Width at each position of a plugin.
            plugins: The step size and the plugin layers of this block.
            activation: Whether the ReLU follows the sum.
        """
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.with_cp = with_cp
        plugins = plugins or BlockPlugins()
        self.plugin_names: dict[str, list[str]] = {}
        for position, configs in plugins.layers.items():
            names = self.plugin_names[position] = []
            for cfg in configs:
                cfg = dict(cfg)
                postfix = cfg.pop('postfix', '')
                name, layer = build_plugin_layer(
                    cfg, in_channels=channels[position], postfix=postfix
                )
                if hasattr(self, name):
                    raise ValueError(
                        f'plugins: {cfg["type"]} would be the second {name!r} of a block; '
                        'give each its own postfix'
                    )
                self.add_module(name, layer)
                names.append(name)
        step_size = None
        if plugins.step_size is not None:
            cfg = dict(plugins.step_size, in_channels=channels[STEP_POSITION])
            kind = MODELS.get(cfg['type']) if isinstance(cfg['type'], str) else cfg['type']
            if getattr(kind, 'takes_map_size', False):
                cfg.setdefault('map_size', plugins.map_size)
            step_size = MODELS.build(cfg)
        self.step = ResidualStep(step_size, self.relu if activation else None)

    def _apply_plugins(self, x: Tensor, position: str) -> Tensor:
        for name in self.plugin_names.get(position, ()):
            x = getattr(self, name)(x)
        return x

    @property
    def last_norm(self) -> nn.Module:
        """The norm before the sum, the one that a zero-initialised residual branch sets to 0."""
        raise NotImplementedError

    def convolve(self, x: Tensor) -> Tensor:
        """The residual branch up to its last norm, (N, C_in, H, W) -> (N, C, H', W')."""
        raise NotImplementedError

    def residual(self, x: Tensor) -> Tensor:
        """The residual branch f, (N, C_in, H, W) -> (N, C, H', W')."""
        return self._apply_plugins(self.last_norm(self.convolve(x)), self.last_position)

    def _forward(self, x: Tensor, memory: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        if self.plugin_names.get(self.last_position):
            residual, norm = self.residual(x), None
        else:
            residual, norm = self.convolve(x), self.last_norm
            if isinstance(norm, nn.Identity) and any(has_hooks(part) for part in self.children()):
                # Folded: what the step may overwrite is the convolution's own output.
                residual, norm = norm(residual), None
        identity = x if self.downsample is None else self.downsample(x)
        return self.step(identity, residual, memory, norm)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The next state; with a recurrent step size, that and the memory for the next block."""
        if self.with_cp and torch.is_grad_enabled():
            contexts = (nullcontext(), _Recomputation(self))
            return checkpoint(
                self._forward, x, memory, use_reentrant=False, context_fn=lambda: contexts
            )
        return self._forward(x, memory)

    @torch.no_grad()
    def fold_norms(self) -> None:
        """Fold batch norms into the convolutions before them; for evaluation mode."""
        # MMCV pairs them by order of registration, which is the order of computation here.
        if not_foldable(self) is None:
            fuse_conv_bn(self)


def not_foldable(module: nn.Module) -> str | None:
    """Why MMCV's folding of norms into convolutions would change what ``module`` computes."""
    modules = [part for _, part in module.named_modules(remove_duplicate=False)]
    convolutions = [id(part) for part in modules if isinstance(part, nn.Conv2d)]
    if len(set(convolutions)) < len(convolutions):
        return 'uses convolutions at several places'
    if any(isinstance(part, ConvWS2d | ConvAWS2d) for part in modules):
        return 'standardises the weights of its convolutions'
    orders = [part.order for part in modules if isinstance(part, ConvModule) and part.with_norm]
    if any(order.index('norm') < order.index('conv') for order in orders):
        return 'has norms in front of its convolutions'
    return None


class Stage(Sequential):
    """The blocks of one stage in order.

    Recurrent step sizes share what the first of them owns and hand their memory from block to
    block. The memory lives in this forward pass alone, so passes that run one after the other or
    are recomputed don't touch each other.
    """

    def __init__(self, *blocks: ResidualBlock):
        super().__init__(*blocks)
        owner, *others = [b.step.step_size for b in blocks if b.step.recurrent] or [None]
        for step_size in others:
            step_size.share(owner)

    def forward(self, x: Tensor) -> Tensor:
        memory = None
        for block in self:
            if block.step.recurrent:
                x, memory = block(x, memory)
            else:
                x = block(x)
        return x


class _Recomputation:
    """Guards a checkpointed block's second forward: it takes the path of the first, statistics
    stay, nothing is recorded.
    """

    def __init__(self, block: ResidualBlock):
        self.block = block
        self.path = plain_steps if block.step.fuse is False else nullcontext

    def __enter__(self):
        self.context = self.path()
        self.context.__enter__()
        self.saved = [(buffer, buffer.clone()) for buffer in self.block.buffers()]
        self.recorder, self.block.step.recorder = self.block.step.recorder, None

    def __exit__(self, *exc):
        self.context.__exit__(*exc)
        self.block.step.recorder = self.recorder
        with torch.no_grad():
            for buffer, value in self.saved:
                buffer.copy_(value)
        self.saved.clear()


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions, depths 18 and 34.

    The names of the layers, and so the keys of a checkpoint, are torchvision's.
    """

    expansion = 1
    positions = ('after_conv1', 'after_conv2', STEP_POSITION)
    last_position = 'after_conv2'

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: nn.Module | None = None,
        style: str = 'pytorch',
        with_cp: bool = False,
        conv_cfg: dict | None = None,
        norm_cfg: dict | None = None,
        dcn: dict | None = None,
        plugins: BlockPlugins | None = None,
    ):
        super().__init__()
        if dcn is not None:
            raise ValueError('dcn needs bottleneck blocks (depth 50 or more)')
        norm_cfg = norm_cfg or dict(type='BN')
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, planes, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        self.conv1 = build_conv_layer(
            conv_cfg, inplanes, planes, 3, stride, padding=dilation, dilation=dilation, bias=False
        )
        self.add_module(self.norm1_name, norm1)
        self.conv2 = build_conv_layer(conv_cfg, planes, planes, 3, padding=1, bias=False)
        self.add_module(self.norm2_name, norm2)
        channels = dict.fromkeys(self.positions, planes)
        self._finish(downsample, with_cp, channels, plugins)

    @property
    def norm1(self) -> nn.Module:
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        return getattr(self, self.norm2_name)

    @property
    def last_norm(self) -> nn.Module:
        return self.norm2

    def convolve(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        return self.conv2(self._apply_plugins(x, 'after_conv1'))


class Bottleneck(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions, depths 50 and more.

    With ``style='pytorch'`` the 3x3 convolution has the stride, with ``'caffe'`` the first 1x1.
    """

    expansion = 4
    positions = ('after_conv1', 'after_conv2', 'after_conv3', STEP_POSITION)
    last_position = 'after_conv3'

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        dilation: int = 1,
        downsample: nn.Module | None = None,
        style: str = 'pytorch',
        with_cp: bool = False,
        conv_cfg: dict | None = None,
        norm_cfg: dict | None = None,
        dcn: dict | None = None,
        plugins: BlockPlugins | None = None,
    ):
        super().__init__()
        norm_cfg = norm_cfg or dict(type='BN')
        out_channels = planes * self.expansion
        self.norm1_name, norm1 = build_norm_layer(norm_cfg, planes, postfix=1)
        self.norm2_name, norm2 = build_norm_layer(norm_cfg, planes, postfix=2)
        self.norm3_name, norm3 = build_norm_layer(norm_cfg, out_channels, postfix=3)

        stride1, stride2 = (1, stride) if style == 'pytorch' else (stride, 1)
        self.conv1 = build_conv_layer(conv_cfg, inplanes, planes, 1, stride1, bias=False)
        self.add_module(self.norm1_name, norm1)
        middle_cfg = conv_cfg
        if dcn is not None:
            dcn = dict(dcn)
            if not dcn.pop('fallback_on_stride', False):
                if conv_cfg is not None:
                    raise ValueError(f'conv_cfg must be None with dcn, got {conv_cfg!r}')
                middle_cfg = dcn
        self.conv2 = build_conv_layer(
            middle_cfg, planes, planes, 3, stride2, padding=dilation, dilation=dilation, bias=False
        )
        self.add_module(self.norm2_name, norm2)
        self.conv3 = build_conv_layer(conv_cfg, planes, out_channels, 1, bias=False)
        self.add_module(self.norm3_name, norm3)
        wide = ('after_conv3', STEP_POSITION)
        channels = {p: out_channels if p in wide else planes for p in self.positions}
        self._finish(downsample, with_cp, channels, plugins)

    @property
    def norm1(self) -> nn.Module:
        return getattr(self, self.norm1_name)

    @property
    def norm2(self) -> nn.Module:
        return getattr(self, self.norm2_name)

    @property
    def norm3(self) -> nn.Module:
        return getattr(self, self.norm3_name)

    @property
    def last_norm(self) -> nn.Module:
        return self.norm3

    def convolve(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        x = self._apply_plugins(x, 'after_conv1')
        x = self.relu(self.norm2(self.conv2(x)))
        return self.conv3(self._apply_plugins(x, 'after_conv2'))
