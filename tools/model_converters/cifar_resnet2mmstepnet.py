"""Convert a CIFAR ResNet checkpoint for mmpretrain classifiers with mmstepnet.StepResNetCifar."""

import argparse
from pathlib import Path

import torch

from mmstepnet.utils.cifar_resnet import convert_cifar_resnet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'source', type=Path, help='checkpoint with names like layer1.0.conv1.weight'
    )
    parser.add_argument('target', type=Path, help='checkpoint to write, .pth')
    args = parser.parse_args()
    if not args.source.is_file():
        parser.error(f'no such file: {args.source}')
    try:
        checkpoint = torch.load(args.source, map_location='cpu', weights_only=True)
        state_dict, backbone = convert_cifar_resnet(checkpoint)
    except Exception as error:
        parser.exit(1, f'{args.source} is not a CIFAR ResNet checkpoint: {error}\n')
    args.target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state_dict=state_dict, meta={}), args.target)
    arguments = ', '.join(f'{name}={value!r}' for name, value in backbone.items())
    print(f"{args.target}\nbackbone=dict(type='mmstepnet.StepResNetCifar', {arguments})")


if __name__ == '__main__':
    main()
