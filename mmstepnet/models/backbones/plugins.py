"""MMDetection's ``plugins`` grammar with a position ``residual_step`` and a choice of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP_POSITION = 'residual_step'
_KEYS = ('cfg', 'stages', 'blocks', 'position')


@dataclass
class BlockPlugins:
    """What one block gets: at most one step size, and plugin layers by position.

    ``map_size`` is the side of the block's output at the training resolution.
    """

    map_size: int | None = None
    step_size: dict | None = None
    layers: dict[str, list[dict]] = field(default_factory=dict)


def resolve_plugins(
    plugins: Sequence[dict] | None,
    identity_blocks: Sequence[Sequence[bool]],
    positions: Sequence[str],
    map_sizes: Sequence[int],
) -> list[list[BlockPlugins]]:
    """Spread a list of plugins over the blocks of a network.

    Args:
        plugins: Each a dict of ``cfg`` (the layer's config), ``position`` (default
            ``'residual_step'``), ``stages`` (one bool a stage, default all) and ``blocks``:
            ``'all'`` (default), ``'identity'`` (only blocks with an identity shortcut) or a list of
            lists of bools, one list a stage, one bool a block.
        identity_blocks: For every stage, which of its blocks have an identity shortcut.
        positions: The positions that this kind of block offers.
        map_sizes: For every stage, the side of its maps at the training resolution.

    Returns:
        For every stage a list with the plugins of each block.

    Raises:
        ValueError: Naming the argument, what was given and what is allowed.
    """
    table = [
        [BlockPlugins(map_size) for _ in stage]
        for stage, map_size in zip(identity_blocks, map_sizes, strict=True)
    ]
    for plugin in plugins or ():
        cfg, position, chosen = _check_plugin(plugin, identity_blocks, positions)
        for stage, row in zip(table, chosen, strict=True):
            for block, is_chosen in zip(stage, row, strict=True):
                if not is_chosen:
                    continue
                if position != STEP_POSITION:
                    block.layers.setdefault(position, []).append(cfg)
                elif block.step_size is None:
                    block.step_size = cfg
                else:
                    raise ValueError(
                        f'plugins: two of them have position={STEP_POSITION!r} on the same block '
                        f'({block.step_size["type"]} and {cfg["type"]}); a block takes one'
                    )
    return table


def _check_plugin(plugin, identity_blocks, positions):
    if not isinstance(plugin, dict) or not isinstance(plugin.get('cfg'), dict):
        raise ValueError(f'plugins: each must be a dict(cfg=dict(type=...), ...), got {plugin!r}')
    if 'type' not in plugin['cfg']:
        raise ValueError(f'plugins: cfg needs a type, got {plugin["cfg"]!r}')
    unknown = sorted(set(plugin) - set(_KEYS))
    if unknown:
        raise ValueError(f'plugins: unknown key {unknown[0]!r}; allowed are {", ".join(_KEYS)}')
    position = plugin.get('position', STEP_POSITION)
    if position not in positions:
        raise ValueError(f'position must be one of {", ".join(positions)}, got {position!r}')
    stages = _check_stages(plugin.get('stages'), len(identity_blocks))
    blocks = _check_blocks(plugin.get('blocks', 'all'), identity_blocks)
    chosen = [[on and block for block in row] for on, row in zip(stages, blocks, strict=True)]
    return plugin['cfg'], position, chosen


def _check_stages(stages, num_stages: int) -> list[bool]:
    if stages is None:
        return [True] * num_stages
    if not _is_mask(stages):
        raise ValueError(f'stages must be a tuple of bools, one a stage, got {stages!r}')
    if len(stages) != num_stages:
        raise ValueError(
            f'stages needs {num_stages} entries, one a stage, got {len(stages)}: {stages!r}'
        )
    return list(stages)


def _check_blocks(blocks, identity_blocks) -> list[list[bool]]:
    if blocks == 'all':
        return [[True] * len(stage) for stage in identity_blocks]
    if blocks == 'identity':
        return [list(stage) for stage in identity_blocks]
    sizes = [len(stage) for stage in identity_blocks]
    if (
        isinstance(blocks, str)
        or not isinstance(blocks, Sequence)
        or not all(map(_is_mask, blocks))
    ):
        raise ValueError(
            f"blocks must be 'all', 'identity' or a list of lists of bools with {sizes} entries, "
            f'got {blocks!r}'
        )
    given = [len(row) for row in blocks]
    if given != sizes:
        raise ValueError(f'blocks has {given} entries by stage, but the stages have {sizes} blocks')
    return [list(row) for row in blocks]


def _is_mask(value) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(entry, bool | int) and entry in (0, 1) for entry in value)
    )
