"""Finding the residual blocks of a network, and listening to what each adds to its state.

A block maps the state x to x + f(x) dt. What x and f are depends on how the block is written, so
there is one listener for each way:

==================== ============================== ============================================
listener             x                              f
==================== ============================== ============================================
``StepListener``     first argument of the sum      second argument; the package's own blocks
``ReluListener``     output of the shortcut         output of the last norm before the sum:
                                                    He et al.'s block, ReLU after the sum
``OutputListener``   output of the shortcut         output minus x: nothing follows the sum, as in
                                                    pre-activation nets, ConvNeXt, Swin and ViT
==================== ============================== ============================================

Without a module on the shortcut its output is the block's input. One block of a transformer is one
encoder layer: both its residual sums, attention and MLP, make one step together.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .norms import mean_quotient, sample_norms

# Blocks whose output is input plus increment, by the package that defines them.
_OUTPUT_BLOCKS = {
    'torchvision': {'CNBlock', 'EncoderBlock', 'SwinTransformerBlock', 'SwinTransformerBlockV2'},
    'timm': {
        'Block',
        'ConvNeXtBlock',
        'ParallelScalingBlock',
        'ResPostBlock',
        'SwinTransformerBlock',
        'SwinTransformerV2Block',
    },
    'mmpretrain': {'ConvNeXtBlock', 'SwinBlock', 'SwinBlockV2', 'TransformerEncoderLayer'},
    'mmdet': {'SwinBlock'},
}
_GATES = ('se', 'se_layer')  # attention after the last norm: timm's and MMPretrain's names

Emit = Callable[[Tensor, Tensor, Tensor], None]


class Block(NamedTuple):
    """One residual block: its name, the number of its stage, and who listens to it."""

    name: str
    stage: int
    listener: 'Listener'


class Listener:
    """Attaches to one block and emits its norms once per forward pass.

    Args:
        name: The block's name, for messages.
        module: The block.
        unit_step: Whether the increment's norm is that of ``f * dt`` instead of ``f``.
    """

    def __init__(self, name: str, module: nn.Module, unit_step: bool):
        self.name, self.module, self.unit_step = name, module, unit_step

    def attach(self, emit: Emit) -> list[Callable[[], None]]:
        """Start to call ``emit(state_norm, increment_norm, dt)``, each (N,) float64.

        Returns:
            Functions that end it.
        """
        raise NotImplementedError


class StepListener(Listener):
    """For modules with a ``recorder`` attribute: :class:`mmstepnet.models.layers.ResidualStep`."""

    def attach(self, emit: Emit) -> list[Callable[[], None]]:
        step = self.module
        if step.recorder is not None:
            raise RuntimeError(f'block {self.name} is being recorded already')

        @torch.no_grad()
        def recorder(step, identity, residual, dt):
            scale = dt if self.unit_step else None
            if dt is None:
                mean_dt = identity.new_ones(len(identity), dtype=torch.float64)
            else:
                dt = dt.reshape((1,) * (residual.dim() - dt.dim()) + dt.shape)
                mean_dt = dt.mean(dim=tuple(range(1, dt.dim())), dtype=torch.float64)
            emit(
                sample_norms(identity),
                sample_norms(residual, times=scale),
                mean_dt.expand(len(identity)),
            )

        def end():
            step.recorder = None

        step.recorder = recorder
        return [end]


class HookListener(Listener):
    """Base of the listeners that use forward hooks: finds the shortcut and notes the state."""

    def __init__(self, name: str, module: nn.Module, unit_step: bool):
        super().__init__(name, module, unit_step)
        self.shortcut = _shortcut(module)
        self.active = False

    def attach(self, emit: Emit) -> list[Callable[[], None]]:
        handles: list[RemovableHandle] = [
            self.module.register_forward_pre_hook(self._begin, with_kwargs=True)
        ]
        if self.shortcut is not None:
            handles.append(self.shortcut.register_forward_hook(self._on_shortcut))
        handles += self._attach_inside()

        def finish(module, args, output):
            if not self.active:
                return
            self.active = False
            try:
                emit(*self._finish(_first_tensor(output)))
            finally:
                self._forget()

        handles.append(self.module.register_forward_hook(finish))
        return [handle.remove for handle in handles] + [self._end]

    def _end(self) -> None:
        self.active = False
        self._forget()

    def _begin(self, module, args, kwargs) -> None:
        # Layers also run outside of their block's forward, where activation checkpointing
        # recomputes them in the backward pass; then there is nothing to listen to.
        self.active = True
        self._forget()
        if self.shortcut is None:
            self._set_state(_first_tensor((*args, *kwargs.values())))

    def _on_shortcut(self, module, args, output) -> None:
        if self.active:
            self._set_state(output)

    def _attach_inside(self) -> list[RemovableHandle]:
        return []

    def _forget(self) -> None:
        """Drop every reference to a feature map."""
        raise NotImplementedError

    def _set_state(self, state: Tensor) -> None:
        raise NotImplementedError

    def _finish(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class OutputListener(HookListener):
    """Blocks where nothing follows the sum: the increment is output minus shortcut."""

    def _forget(self) -> None:
        self.state = self.version = None

    def _set_state(self, state: Tensor) -> None:
        self.state, self.version = state, _version(state)

    def _finish(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state
        if state is None:
            raise ValueError(f'block {self.name} did not use its shortcut in this forward pass')
        if state.shape != output.shape:
            raise ValueError(
                f'block {self.name} turns shape {tuple(state.shape)} into {tuple(output.shape)}: '
                'it is no residual block, or its shortcut is not a module named downsample or '
                'shortcut; leave it out of blocks'
            )
        if not torch.equal(_version(state), self.version):
            raise ValueError(
                f'block {self.name} changes its input in place, so its increment cannot be told'
            )
        dt = output.new_ones(len(output), dtype=torch.float64)
        return sample_norms(state), sample_norms(output, minus=state), dt


class ReluListener(HookListener):
    """Blocks of He et al.: norm, sum with the shortcut, activation."""

    def __init__(self, name: str, module: nn.Module, unit_step: bool):
        super().__init__(name, module, unit_step)
        self.source = _residual_source(module)
        gates = (getattr(module, gate, None) for gate in _GATES)
        self.gate = next((gate for gate in gates if isinstance(gate, nn.Module)), None)
        plugins = _plugins(module)
        if self.gate is None and plugins and _is_step_size(plugins[-1]):
            self.gate = plugins[-1]
        self.verified = False

    def _attach_inside(self) -> list[RemovableHandle]:
        handles = [self.source.register_forward_hook(self._on_residual)]
        if self.gate is not None:
            handles.append(self.gate.register_forward_hook(self._on_gate))
        return handles

    def _forget(self) -> None:
        self.state_norm = self.increment_norm = self.dt = None
        self.first_state = self.first_increment = None

    def _set_state(self, state: Tensor) -> None:
        self.state_norm = sample_norms(state)
        if not self.verified:
            self.first_state = state[0].detach().clone()

    def _on_residual(self, module, args, output) -> None:
        if not self.active:
            return
        if self.gate is None or not self.unit_step:
            self.increment_norm = sample_norms(output)
        if not self.verified:
            self.first_increment = output[0].detach().clone()

    def _on_gate(self, module, args, output) -> None:
        if not self.active:
            return
        if self.unit_step:
            self.increment_norm = sample_norms(output)
        self.dt = mean_quotient(output, args[0])
        if not self.verified:
            self.first_increment = output[0].detach().clone()

    def _finish(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state_norm, increment_norm, dt = self.state_norm, self.increment_norm, self.dt
        if state_norm is None or increment_norm is None:
            raise ValueError(
                f'block {self.name} did not use its shortcut and its last norm in this forward pass'
            )
        # Stochastic depth makes single samples differ from the sum, in training only.
        if not self.verified and not self.module.training:
            self._verify(output[0])
        if dt is None:
            dt = torch.ones_like(state_norm)
        return state_norm, increment_norm, dt

    @torch.no_grad()
    def _verify(self, output: Tensor) -> None:
        """Compare the first sample with what the block is taken for; wrong numbers look right."""
        total = self.first_state.double() + self.first_increment.double()
        if not (total.isfinite().all() and output.isfinite().all()):
            return  # it says nothing; another pass will
        # Activations differ below zero; well above it they all return what they get.
        error = (output.double() - total).where(total > 0.5 * total.max(), 0).abs().max()
        if error > 0.05 * total.abs().max():
            raise ValueError(
                f'block {self.name} does not return activation(shortcut + last norm): something '
                'else happens between its last norm and its sum, so its increment cannot be told; '
                'leave it out of blocks'
            )
        self.verified = True


def find_blocks(
    model: nn.Module,
    blocks: str | re.Pattern | Sequence | None,
    unit_step: bool,
    exclude_first: bool,
) -> list[Block]:
    """Find the residual blocks of a model in the order of their registration.

    Args:
        model: Any network.
        blocks: See :class:`TrajectoryRecorder`.
        unit_step: See :class:`Listener`.
        exclude_first: Whether to leave out the first of every stage.

    Raises:
        TypeError: ``blocks`` is neither a pattern nor names.
        ValueError: no block found, or none left; a name or pattern that matches nothing. Candidates
            are listed.
    """
    modules = dict(model.named_modules())
    if blocks is None:
        found = _detect(modules)
        if not found:
            raise ValueError(
                f'no residual blocks known in {type(model).__name__}: {_candidates(modules)}'
            )
        stage_keys = [_stage_key(name) for name in found]
    else:
        found, stage_keys = _select(modules, blocks)
    stages = {key: stage for stage, key in enumerate(dict.fromkeys(stage_keys))}

    result, seen = [], set()
    for name, key in zip(found, stage_keys, strict=True):
        if key in seen or not exclude_first:
            listener = _listener(name, modules[name], modules, unit_step)
            result.append(Block(_block_name(name), stages[key], listener))
        seen.add(key)
    if not result:
        raise ValueError(
            f'every stage of {type(model).__name__} has a single block, and exclude_first leaves '
            'none; exclude_first=False records them; blocks found: '
            + ', '.join(map(_block_name, found))
        )
    return result


def _detect(modules: dict[str, nn.Module]) -> list[str]:
    steps = [name for name, module in modules.items() if _is_step(module)]
    if steps:
        return steps
    kinds = {type(module) for module in modules.values() if _has_shortcut_attribute(module)}
    found: list[str] = []
    for name, module in modules.items():
        inside = any(name.startswith(f'{outer}.') for outer in found)
        is_block = (type(module) in kinds and _numbered_layers(module)) or _is_output_block(module)
        if is_block and not inside:
            found.append(name)
    return found


def _select(modules: dict[str, nn.Module], blocks) -> tuple[list[str], list]:
    """Names of the chosen modules, and a key of each one's stage."""
    if isinstance(blocks, str | re.Pattern):
        names = [name for name in modules if name and _matches(name, blocks)]
        if not names:
            pattern = blocks if isinstance(blocks, str) else blocks.pattern
            raise ValueError(f'blocks={pattern!r} matches no module: {_candidates(modules)}')
        return names, [_stage_key(name) for name in names]
    if not isinstance(blocks, Sequence) or not blocks:
        raise TypeError(
            f'blocks must be a pattern, names, or one list of names a stage, got {blocks!r}'
        )
    if all(isinstance(name, str) for name in blocks):
        names, keys = list(blocks), [_stage_key(name) for name in blocks]
    elif all(isinstance(stage, Sequence) and not isinstance(stage, str) for stage in blocks):
        names = [name for stage in blocks for name in stage]
        keys = [number for number, stage in enumerate(blocks) for _ in stage]
    else:
        raise TypeError('blocks must be either names or lists of names, not both')
    if missing := [name for name in names if name not in modules]:
        raise ValueError(f'blocks names {missing}, not in the model: {_candidates(modules)}')
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f'blocks names {twice} more than once, and a block counts once')
    return names, keys


def _matches(name: str, pattern: str | re.Pattern) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(name) is not None
    parts, globs = name.split('.'), pattern.split('.')
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _listener(name, module, modules, unit_step) -> Listener:
    steps = [child for child in module.modules() if _is_step(child)]
    block = _block_name(name)
    if len(steps) == 1:
        return StepListener(block, steps[0], unit_step)
    if steps:
        raise ValueError(f'{block} holds {len(steps)} residual steps: name one in blocks')
    kinds = {type(other) for other in modules.values() if _has_shortcut_attribute(other)}
    layers = _numbered_layers(module)
    if type(module) in kinds and layers and not _is_output_block(module):
        order = list(module._modules.values())
        conv, norm = layers
        if order.index(norm) > order.index(conv):
            return ReluListener(block, module, unit_step)
    return OutputListener(block, module, unit_step)


def _is_step(module: nn.Module) -> bool:
    return hasattr(module, 'recorder') and hasattr(module, 'step_size')


def _is_output_block(module: nn.Module) -> bool:
    return any(
        cls.__name__ in _OUTPUT_BLOCKS.get(cls.__module__.partition('.')[0], ())
        for cls in type(module).__mro__
    )


def _has_shortcut_attribute(module: nn.Module) -> bool:
    return hasattr(module, 'downsample') or hasattr(module, 'shortcut')


def _shortcut(module: nn.Module) -> nn.Module | None:
    for name in ('downsample', 'shortcut'):
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            return child
    return None


def _numbered_layers(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Last convolution and last norm of a block in He et al.'s numbering, or None."""
    children = list(module._modules.values())
    for number in (3, 2):
        conv = getattr(module, f'conv{number}', None)
        for name in (f'bn{number}', f'norm{number}'):
            norm = getattr(module, name, None)
            if any(conv is child for child in children) and any(norm is c for c in children):
                return conv, norm
    return None


def _residual_source(module: nn.Module) -> nn.Module:
    """The layer that f comes from: the last norm, or MMDetection's plugin layers after it, but for
    a step size at the end."""
    layers = [_numbered_layers(module)[1], *_plugins(module)]
    return layers[-2] if _is_step_size(layers[-1]) else layers[-1]


def _plugins(module: nn.Module) -> list[nn.Module]:
    """MMDetection's plugin layers behind a block's last convolution."""
    for number in (3, 2):
        if names := getattr(module, f'after_conv{number}_plugin_names', None):
            return [getattr(module, name) for name in names]
        if getattr(module, f'conv{number}', None) is not None:
            break
    return []


def _is_step_size(module: nn.Module) -> bool:
    """Whether a plugin layer scales what it gets, as those here do; others add to it."""
    return hasattr(module, 'gate') and hasattr(module, 'means')


def _block_name(name: str) -> str:
    return name.removesuffix('.step')


def _stage_key(name: str) -> str:
    """What stands before the last index of a name: ``layer1`` of ``layer1.0``."""
    parts = _block_name(name).split('.')
    for position in range(len(parts) - 1, -1, -1):
        if parts[position].isdigit():
            return '.'.join(parts[:position])
    return '.'.join(parts[:-1])


def _candidates(modules: dict[str, nn.Module]) -> str:
    """Sentence that lists repeated modules and asks for ``blocks``."""
    by_kind: dict[str, list[str]] = {}
    for name, module in modules.items():
        if name and next(module.children(), None) is not None:
            by_kind.setdefault(type(module).__name__, []).append(name)
    lines = [
        f'  {len(names)} x {kind}: {names[0]} ... {names[-1]}'
        for kind, names in by_kind.items()
        if len(names) > 1 and kind not in ('Sequential', 'ModuleList')
    ]
    if not lines:
        return 'it repeats no module; is it a residual network?'
    return (
        "give blocks='PATTERN' ('layer*.*' for instance) or a list of names. Repeated modules:\n"
        + '\n'.join(lines)
    )


def _first_tensor(values: Tensor | Iterable) -> Tensor:
    if isinstance(values, Tensor):
        return values
    found = next((value for value in values if isinstance(value, Tensor)), None)
    if found is None:
        raise ValueError(
            f'a block gets or returns a {type(values).__name__} without a tensor in it; leave it '
            'out of blocks'
        )
    return found


def _version(tensor: Tensor) -> Tensor:
    """What changes when a tensor is written to. Inference tensors count no versions."""
    if tensor.is_inference():
        return sample_norms(tensor).nan_to_num()  # NaN would differ from itself
    return torch.tensor(tensor._version)
