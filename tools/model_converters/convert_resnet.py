"""Convert a ResNet of torchvision, timm or a CIFAR repository to a checkpoint of this package.

ResNet-18 to 152 become mmstepnet.StepResNet: torchvision's, and timm's with its deep stem, pooled
shortcuts (ResNet-C and -D), squeeze-and-excitation or ECA. CIFAR ResNets with three stages become
mmstepnet.StepResNetCifar. The tool recognises them by their weights and prints the backbone's
config. The checkpoint serves as a whole MMPretrain classifier with LinearClsHead, and by
init_cfg=dict(type='Pretrained', checkpoint=TARGET, prefix='backbone.') in any model.

Other networks are refused. What leaves no trace in the weights can't be seen: other activations or
gates than the usual ones, anti-aliasing (resnetaa, resnetblur), strides in a bottleneck's first
convolution.
"""

import argparse
from pathlib import Path

from mmstepnet.utils.checkpoint import CheckpointError
from mmstepnet.utils.command_line import fail, reason
from mmstepnet.utils.publish import write_checkpoint
from mmstepnet.utils.resnet_weights import convert_resnet, read_resnet_weights


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'source',
        help='state dict or training checkpoint (.pth, .tar, .safetensors, ...), or an address '
        'like torchvision://resnet50',
    )
    parser.add_argument(
        'target',
        type=Path,
        help='checkpoint to write, .pth; a file with another content is not overwritten',
    )
    args = parser.parse_args()
    if args.target.suffix != '.pth':
        parser.error(f'TARGET must end in .pth, got {args.target}')
    return args


def summary(source: str, container: str | None, weights: dict, backbone: dict) -> str:
    """What was converted and how a config uses it."""
    lines = [f'{source}: weights under {container!r}'] if container else []
    arguments = ', '.join(f'{name}={value!r}' for name, value in backbone.items())
    lines.append(f'backbone=dict({arguments})')
    if 'head.fc.weight' in weights:
        classes, channels = weights['head.fc.weight'].shape
        lines.append(
            f"head=dict(type='LinearClsHead', num_classes={classes}, in_channels={channels})"
        )
        lines.append('A backbone alone takes no notice of head.fc.weight and head.fc.bias.')
    else:
        lines.append('No classifier in it: it serves as a backbone.')
    if 'plugins' not in backbone:
        lines.append('No step sizes in it: those that plugins add start fresh (layerI.J.step.*).')
    return '\n'.join(lines)


def main() -> None:
    args = parse_args()
    try:
        weights, container = read_resnet_weights(args.source)
        weights, backbone = convert_resnet(weights)
    except CheckpointError as error:
        fail(error)
    except ValueError as error:
        fail(f'{args.source}: {error}')
    try:
        write_checkpoint(dict(meta={}, state_dict=weights), args.target)
    except (OSError, ValueError) as error:
        fail(f'TARGET {args.target} can not be written: {reason(error)}')
    print(summary(args.source, container, weights, backbone))


if __name__ == '__main__':
    main()
