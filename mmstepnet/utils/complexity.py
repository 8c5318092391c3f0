"""Parameters and FLOPs of a network, and the part of them that its step sizes are.

MMEngine's ``FlopAnalyzer`` traces the network and counts operator by operator; this module adds the
operators that it leaves out, and a fixed path through detectors, whose own depends on what they see
in a picture.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch
from mmengine.analysis import FlopAnalyzer
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor, nn

from mmstepnet.models.layers import IEBN
from mmstepnet.models.step_sizes.base import StepSize

CONVENTION = (
    'One FLOP is one multiply-add, as MMEngine and fvcore count; where a paper counts two, halve '
    'its number. Each other arithmetic operation on an element is one (sums, products, sigmoid, '
    'pooling), a normalisation two, with statistics of its own input five, a softmax three. ReLU, '
    'comparisons, copies and resampling in RoIAlign are none; what follows the network (decoding '
    'of boxes, NMS) is left out.'
)


def _size(value) -> int:
    """Elements of a traced value; 0 where it is no floating-point tensor (arithmetic of shapes)."""
    if not value.isCompleteTensor() or not value.type().dtype().is_floating_point:
        return 0
    return prod(value.type().sizes())


def _per_output(factor: int = 1) -> Callable[[list, list], int]:
    return lambda inputs, outputs: factor * _size(outputs[0])


def _per_input(factor: int = 1) -> Callable[[list, list], int]:
    return lambda inputs, outputs: factor * _size(inputs[0])


def _attention(inputs: list, outputs: list) -> int:
    """Scores, softmax and weighted sum: q (..., L, E), k (..., S, E), v (..., S, V)."""
    q, k, v = (value.type().sizes() for value in inputs[:3])
    return prod(q[:-1]) * k[-2] * (q[-1] + 3 + v[-1])


_ELEMENTWISE = (
    *('add', 'sub', 'rsub', 'mul', 'div', 'addcmul', 'addcdiv', 'neg', 'abs', 'reciprocal'),
    *('square', 'pow', 'sqrt', 'rsqrt', 'exp', 'log', 'log2', 'erf'),
    *('sigmoid', 'hardsigmoid', 'tanh', 'gelu', 'silu', 'hardswish', 'mish', 'softplus'),
)
_REDUCTIONS = ('mean', 'sum', 'prod', 'cumsum', 'avg_pool2d', 'logsumexp')
_FREE = (
    *('max_pool2d', 'amax', 'amin', 'argmax', 'min', 'maximum', 'minimum', 'where', 'topk', 'sort'),
    *('unflatten', 'numpy_T', 'pad', 'pixel_unshuffle', 'pixel_shuffle', 'view_as', 'reshape_as'),
    *('expand_as', 'repeat', 'tile', 'clone', 'alias', 'meshgrid', 'linspace', 'lift_fresh'),
    *('new_ones',),
    *('lt', 'le', 'ne', 'logical_and', 'logical_or', 'logical_not', 'isnan', 'floordiv', 'rand'),
    *('hardtanh', 'hardtanh_', 'leaky_relu', 'leaky_relu_', 'threshold', 'sign'),
)
_HANDLES = {
    **{f'aten::{name}{ending}': _per_output() for name in _ELEMENTWISE for ending in ('', '_')},
    **{f'aten::{name}': _per_input() for name in _REDUCTIONS},
    # A square and a sum.
    **{f'aten::{name}': _per_input(2) for name in ('var', 'std', 'var_mean', 'norm')},
    'aten::linalg_vector_norm': _per_input(2),
    **{f'aten::{name}': _per_output(3) for name in ('softmax', 'log_softmax')},
    'aten::scaled_dot_product_attention': _attention,
    **{f'aten::{name}': None for name in _FREE},
    # FlopAnalyzer can't ignore a Python operator by name.
    'prim::PythonOp.RoIAlignFunction': lambda inputs, outputs: 0,
}


@dataclass
class Cost:
    """Parameters and FLOPs of one or several modules."""

    kind: str
    modules: int
    parameters: int
    flops: int


@dataclass
class Complexity:
    """What a network costs on one picture.

    Attributes:
        parameters: Elements of all parameters, each once.
        flops: Multiply-adds and what :data:`CONVENTION` puts beside them.
        input_shape: (C, H, W) of the picture as the network sees it, padded.
        parts: Cost of the network's direct parts by name, and of what it computes outside of them
            under the name ``''`` if there is such.
        step_sizes: Cost of step sizes by class, outermost ones where they are nested. IEBN counts
            as one, its normalisation included.
        proposals: Regions that a two-stage detector's second stage is given, None for others.
        unknown: Operators that nobody has counted, with their number of calls.
    """

    parameters: int
    flops: int
    input_shape: tuple[int, int, int]
    parts: dict[str, Cost]
    step_sizes: dict[str, Cost]
    proposals: int | None = None
    unknown: dict[str, int] = field(default_factory=dict)


def measure_complexity(model: nn.Module, height: int, width: int) -> Complexity:
    """Count parameters and FLOPs of a detector, a classifier or any network of pictures.

    The picture is padded as the model's data preprocessor pads. A two-stage detector's second stage
    gets as many proposals as ``test_cfg.rpn.max_per_img`` lets through, whatever the weights; a
    mask head the first 100 of them, as in MMDetection's own ``forward``.

    Args:
        model: An MMDetection or MMPretrain model, or a module that maps (N, C, H, W). It is put
            in evaluation mode.
        height: Of the picture.
        width: Of the picture.

    Raises:
        ValueError: A side below 1, or the network can't take a picture of this size.
    """
    for name, side in (('height', height), ('width', width)):
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise ValueError(f'{name} must be a positive int, got {side!r}')
    preprocessor = getattr(model, 'data_preprocessor', None)
    divisor = getattr(preprocessor, 'pad_size_divisor', 1) or 1
    height, width = (-(-side // divisor) * divisor for side in (height, width))
    mean = getattr(preprocessor, 'mean', None)
    channels = 3 if mean is None else mean.numel()

    network = _Network(model, height, width)
    device = next((p.device for p in model.parameters()), 'cpu')
    inputs = torch.zeros(1, channels, height, width, device=device)
    analyzer = FlopAnalyzer(network, (inputs,)).set_op_handle(**_HANDLES)
    analyzer.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    model.eval()
    try:
        with torch.no_grad():
            flops = {name: int(count) for name, count in analyzer.by_module().items()}
    except (RuntimeError, ValueError, AssertionError, IndexError) as error:
        raise ValueError(
            f'a picture of {channels} x {height} x {width} can not be computed: {error}'
        ) from error

    def cost(modules: dict[str, nn.Module]) -> Cost:
        parameters = {p for module in modules.values() for p in module.parameters()}
        # A module under several names is counted under the first.
        names = {analyzer.canonical_module_name(f'model{name and "."}{name}') for name in modules}
        kind = type(next(iter(modules.values()))).__name__
        count = sum(flops[name] for name in names)
        return Cost(kind, len(modules), sum(p.numel() for p in parameters), count)

    whole = cost({'': model})
    parts = {name: cost({name: child}) for name, child in model.named_children()}
    parts = {name: part for name, part in parts.items() if part.parameters or part.flops}
    rest = whole.flops - sum(part.flops for part in parts.values())
    own = sum(p.numel() for p in model.parameters(recurse=False))
    if rest or own:
        parts[''] = Cost(whole.kind, 1, own, rest)

    kinds = {}
    for name, module in _outermost_step_sizes(model).items():
        kinds.setdefault(type(module).__name__, {})[name] = module
    step_sizes = {kind: cost(modules) for kind, modules in kinds.items()}
    return Complexity(
        parameters=whole.parameters,
        flops=whole.flops,
        input_shape=(channels, height, width),
        parts=parts,
        step_sizes=step_sizes,
        proposals=network.proposals,
        unknown=dict(analyzer.unsupported_ops()),
    )


def _outermost_step_sizes(model: nn.Module) -> dict[str, nn.Module]:
    found = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f'{other}.') for other in found)
        if isinstance(module, StepSize | IEBN) and not inside:
            found[name] = module
    return found


class _Network(nn.Module):
    """The model from picture to raw outputs, on a path that no weight decides on."""

    def __init__(self, model: nn.Module, height: int, width: int):
        super().__init__()
        self.model = model
        size = (height, width)
        info = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size)
        self.samples = [BaseDataElement(metainfo=dict(info, scale_factor=(1.0, 1.0)))]
        self.proposals = None
        if getattr(model, 'with_rpn', False) and getattr(model, 'with_roi_head', False):
            if model.test_cfg.get('rpn') is None:
                raise ValueError(
                    f'{type(model).__name__} with {type(model.rpn_head).__name__}: how many '
                    'proposals it has is not known (test_cfg.rpn), nor what it computes of them'
                )
            self.proposals = int(model.test_cfg.rpn.max_per_img)
        elif getattr(model, 'with_roi_head', False):
            raise ValueError(f'{type(model).__name__} takes proposals from elsewhere')

    def forward(self, inputs: Tensor):
        model = self.model
        if self.proposals is not None:
            maps = model.extract_feat(inputs)
            # Of all sizes: for a level without any, MMDetection's RoI extractor adds zeros.
            side = 56.0 * 2 ** (torch.arange(self.proposals) % 4)
            boxes = torch.stack((0 * side, 0 * side, side, side), 1).to(inputs)
            second = model.roi_head.forward(maps, [InstanceData(bboxes=boxes)], self.samples)
            # What isn't returned is taken out of the trace.
            return model.rpn_head(maps), second
        if hasattr(model, 'data_preprocessor'):
            return model(inputs, self.samples, mode='tensor')
        return model(inputs)
