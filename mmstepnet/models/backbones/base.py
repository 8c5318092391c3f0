"""What the residual backbones share: how step sizes start, freeze and deploy."""

from collections.abc import Iterator
from pathlib import Path

import torch
from mmcv.cnn import fuse_conv_bn
from mmengine.dist import get_world_size
from mmengine.logging import print_log
from mmengine.model import BaseModule, constant_init
from mmengine.runner import CheckpointLoader
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mmstepnet.models.layers.residual_step import ResidualStep

from .blocks import ResidualBlock, not_foldable

_DEFAULT_INIT = [
    dict(type='Kaiming', layer='Conv2d'),
    dict(type='Constant', val=1, layer=['_BatchNorm', 'GroupNorm']),
]


class ResidualBackbone(BaseModule):
    """Base of backbones whose blocks end in a :class:`ResidualStep`.

    A step size is *fresh* as long as no checkpoint has supplied its weights. Fresh step sizes keep
    the start that their constructor gave them, whatever ``init_cfg`` does to the convolutions
    around them, and are exempt from ``frozen_stages`` and ``norm_eval``: frozen at their start,
        with the running statistics 0 and 1,
    they would never learn anything. ``init_weights()`` settles which are fresh and logs it;
    resuming a run later doesn't change it, so that an interrupted training goes on as it began.

    A subclass names its stages ``layer1``, ``layer2``, ...; their blocks are
    :class:`ResidualBlock`.

    Args:
        frozen_stages: The stem (0) and this many stages are not trained; -1 freezes nothing.
        norm_eval: Keep batch norms in evaluation mode during training.
        zero_init_residual: Start every residual branch at 0, by the norm before the sum.
        init_cfg: As for MMEngine modules; by default Kaiming for convolutions and 1 for norms.
    """

    def __init__(self, frozen_stages, norm_eval, zero_init_residual, init_cfg):
        super().__init__(init_cfg or _DEFAULT_INIT)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.zero_init_residual = zero_init_residual and not init_cfg
        self._settled = False
        self._loaded_steps: set[str] = set()

    @property
    def stages(self) -> list[nn.Module]:
        """The stages in order, each a sequence of blocks."""
        return [getattr(self, name) for name in self.res_layers]

    def blocks(self) -> Iterator[ResidualBlock]:
        """All residual blocks in order."""
        return (block for stage in self.stages for block in stage)

    def steps(self) -> dict[str, ResidualStep]:
        """The residual steps that have a step size, by module name."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, ResidualStep) and module.step_size is not None
        }

    def fresh_steps(self) -> dict[str, ResidualStep]:
        """The residual steps whose step size has its weights from no checkpoint, by module name.

        A recurrent step size that uses an earlier block's cell has no weights of its own.
        """
        return {
            name: step
            for name, step in self.steps().items()
            if name not in self._loaded_steps and any(True for _ in step.step_size.parameters())
        }

    def _frozen_modules(self) -> list[nn.Module]:
        """Everything that ``frozen_stages`` covers."""
        if self.frozen_stages < 0:
            return []
        return [*self._stem_modules(), *self.stages[: self.frozen_stages]]

    def _stem_modules(self) -> list[nn.Module]:
        raise NotImplementedError

    def _freeze_stages(self) -> None:
        fresh = {id(p) for s in self.fresh_steps().values() for p in s.step_size.parameters()}
        for module in self._frozen_modules():
            module.eval()
            for param in module.parameters():
                param.requires_grad_(id(param) in fresh)

    def train(self, mode: bool = True):
        """Set the mode; frozen stages and, with ``norm_eval``, batch norms stay in evaluation."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        if mode:
            for step in self.fresh_steps().values():
                step.train()
        return self

    def _peek_pretrained(self) -> None:
        """Learn before training is set up whether a local checkpoint brings step sizes.

        DistributedDataParallel wraps a model before ``init_weights()`` runs and must already see
        which parameters are trained.
        """
        cfg = self.init_cfg
        if not (
            isinstance(cfg, dict) and cfg.get('type') == 'Pretrained' and self.frozen_stages > 0
        ):
            return
        if self.steps() and Path(str(cfg['checkpoint'])).is_file():
            state = CheckpointLoader.load_checkpoint(cfg['checkpoint'], map_location='cpu')
            self._note_loaded(state.get('state_dict', state), cfg.get('prefix', ''))
            self._freeze_stages()

    def _note_loaded(self, state_dict, prefix: str) -> None:
        if prefix and not prefix.endswith('.'):
            prefix += '.'
        for name, step in self.steps().items():
            start = f'{prefix}{name}.step_size.'
            own = {
                start + key: value.shape
                for key, value in step.step_size.state_dict().items()
                if not key.endswith('num_batches_tracked')
            }
            # All of them and of these shapes: another kind of step size has other weights there.
            if own and all(
                key in state_dict and state_dict[key].shape == shape for key, shape in own.items()
            ):
                self._loaded_steps.add(name)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not self._settled:
            self._note_loaded(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def init_weights(self) -> None:
        """Initialise by ``init_cfg``; fresh step sizes keep the start of their constructor."""
        again = self.is_init
        super().init_weights()
        if again:  # MMEngine has warned that nothing is initialised twice.
            return
        if self.zero_init_residual:
            for block in self.blocks():
                constant_init(block.last_norm, 0)
        fresh = self.fresh_steps()
        for step in fresh.values():
            step.step_size.reset_parameters()
        self._settled = True
        trained_so_far = [
            p for m in self._frozen_modules() for p in m.parameters() if p.requires_grad
        ]
        self.train(self.training)
        if get_world_size() > 1 and any(not p.requires_grad for p in trained_so_far):
            raise RuntimeError(
                f'{self.init_cfg["checkpoint"]} brings weights for step sizes in frozen stages, '
                'known too late for distributed training: download it and give its local path'
            )
        self._report_fresh(fresh)

    def _report_fresh(self, fresh: dict[str, ResidualStep]) -> None:
        if not fresh:
            return
        frozen = {id(m) for stage in self._frozen_modules() for m in stage.modules()}
        message = (
            f'{type(self).__name__}: {len(fresh)} of {len(self.steps())} step sizes start fresh, '
            f'init_cfg brought no weights for them: {", ".join(fresh)}.'
        )
        exempt = [name for name, step in fresh.items() if id(step) in frozen]
        if exempt:
            message += f' Trained although frozen_stages={self.frozen_stages}: {", ".join(exempt)}.'
        if self.norm_eval:
            message += ' Their batch norms take batch statistics although norm_eval=True.'
        print_log(message, logger='current')

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """Fold step sizes that can be folded and the trunk's batch norms, in place.

        A second call changes nothing.

        Raises:
            RuntimeError: In training mode.
        """
        if self.training:
            raise RuntimeError('switch_to_deploy() needs evaluation mode: call eval() first')
        for step in self.steps().values():
            if hasattr(step.step_size, 'switch_to_deploy'):
                step.step_size.switch_to_deploy()
        for block in self.blocks():
            block.fold_norms()
        stem = self._stem_modules()
        names = {id(module): name for name, module in self.named_children()}
        if not_foldable(nn.ModuleList(stem)) is None:
            for before, after in zip(stem, fuse_conv_bn(nn.ModuleList(stem)), strict=True):
                setattr(self, names[id(before)], after)
        # What took the place of norms is new and in training mode.
        self.eval()
