"""Fold a trained model's step sizes and batch norms, and write a checkpoint or an ONNX file.

A folded checkpoint loads into the same model after ``mmstepnet.models.switch_to_deploy(model)``. An
ONNX file has batch and picture size as free dimensions; of a detector it holds the backbone, since
what follows depends on the inference engine. Nothing is written unless the folded model gives the
same outputs (of a detector: maps of backbone and neck) on a random picture.
"""

import argparse
import copy
import os
import sys
from pathlib import Path

import torch

from mmstepnet.models import switch_to_deploy
from mmstepnet.utils import checkpoint as ckpt
from mmstepnet.utils.command_line import build_model, fail, load_config, make_folder, reason
from mmstepnet.utils.publish import write_checkpoint

TOLERANCE = 1e-4
STRIDE = 32  # the coarsest maps' in pixels


class Deployed(torch.nn.Module):
    """What an inference engine gets: a classifier's scores, or a detector's feature maps."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.is_classifier = hasattr(model, 'head')

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.is_classifier:
            return (self.model(inputs),)
        return tuple(self.model.backbone(inputs))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument('out', type=Path, help='file to write, .pth or .onnx')
    parser.add_argument(
        '--size', type=int, nargs=2, default=(224, 224), metavar=('H', 'W'), help='example picture'
    )
    args = parser.parse_args()
    if args.out.suffix not in ('.pth', '.onnx'):
        parser.error(f'OUT must end in .pth or .onnx, got {args.out}')
    if min(args.size) < 1:
        parser.error(f'--size must be two positive numbers, got {args.size[0]} {args.size[1]}')
    if args.out.suffix == '.onnx' and any(side % STRIDE for side in args.size):
        parser.error(
            f'--size must be multiples of {STRIDE} for .onnx, got {args.size[0]} {args.size[1]}'
        )
    return args


def largest_error(model: torch.nn.Module, folded: torch.nn.Module, inputs: torch.Tensor) -> float:
    """Of all outputs, the largest ``||difference|| / ||output||``."""

    def outputs(model):
        # A detector's neck is folded, too.
        return Deployed(model)(inputs) if hasattr(model, 'head') else model.extract_feat(inputs)

    with torch.no_grad():
        pairs = zip(outputs(model), outputs(folded), strict=True)
        return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)


def write_onnx(model: torch.nn.Module, inputs: torch.Tensor, path: Path) -> None:
    """Export with free batch and picture size, each a multiple of the smallest stride."""
    size = {2 + i: STRIDE * torch.export.Dim(name, min=1) for i, name in enumerate('hw')}
    torch.onnx.export(
        Deployed(model).eval(),
        (inputs,),
        str(path),
        input_names=['input'],
        dynamic_shapes=({0: torch.export.Dim('batch', min=1), **size},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def main() -> None:
    args = parse_args()
    if args.out.exists():
        fail(f'{args.out} is there already: choose another name, or delete it')
    cfg = load_config(args.config)
    model = build_model(cfg)
    try:
        content = ckpt.read_checkpoint(args.checkpoint)
        ckpt.check_same_network(model, content, args.checkpoint)
    except ValueError as error:
        fail(reason(error))
    model.eval()
    folded = switch_to_deploy(copy.deepcopy(model))
    mean = getattr(model.data_preprocessor, 'mean', None)
    channels = 3 if mean is None else len(mean)
    # Two pictures: torch.export takes a dimension of 1 for a constant.
    inputs = torch.randn(2, channels, *args.size)
    try:
        error = largest_error(model, folded, inputs)
    except RuntimeError as problem:
        fail(
            f'--size {args.size[0]} {args.size[1]} is no picture for this model: {reason(problem)}'
        )
    if not error <= TOLERANCE:
        fail(f'folding changes the outputs by a relative {error:.1e}, nothing is written')
    make_folder(args.out.parent)
    if args.out.suffix == '.onnx':
        temporary = args.out.with_name(f'{args.out.name}.tmp')
        write_onnx(folded, inputs, temporary)
        os.replace(temporary, args.out)
    else:
        meta = dict(content.get('meta') or {}, deployed=True)
        try:
            write_checkpoint(dict(state_dict=folded.state_dict(), meta=meta), args.out)
        except (OSError, ValueError) as problem:
            fail(f'{args.out} can not be written: {reason(problem)}')
    print(f'{args.out}: outputs differ by a relative {error:.1e}', file=sys.stderr)


if __name__ == '__main__':
    main()
