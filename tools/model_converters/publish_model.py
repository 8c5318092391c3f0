"""Make a slim checkpoint to hand on from one of a training, with its hash in the name.

Keeps the weights and of the rest what inference needs: class names, the config's text, epoch.
Optimizer, schedules, logs and hooks' states are left out, and so is the second set of weights of an
EMAHook: state_dict holds the averaged ones, those that were validated.

The same checkpoint gives the same file. torch.hub.load_state_dict_from_url(..., check_hash=True)
verifies the name.
"""

import argparse
from pathlib import Path

from mmstepnet.utils.checkpoint import read_checkpoint
from mmstepnet.utils.command_line import fail, reason
from mmstepnet.utils.publish import slim_checkpoint, write_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        'out',
        type=Path,
        help='name of the new file, to which the hash is added: models/resnet50.pth is written as '
        'models/resnet50-1a2b3c4d.pth',
    )
    args = parser.parse_args()
    if args.out.suffix != '.pth':
        parser.error(f'OUT must end in .pth, got {args.out}')
    return args


def main() -> None:
    args = parse_args()
    try:
        checkpoint = read_checkpoint(args.checkpoint)
    except ValueError as error:
        fail(reason(error))
    slim = slim_checkpoint(checkpoint)
    try:
        path = write_checkpoint(slim, args.out, with_hash=True)
    except (OSError, ValueError) as error:
        fail(f'OUT {args.out} can not be written: {reason(error)}')
    print(f'{path} ({path.stat().st_size / 1e6:.1f} MB)')
    if 'ema_state_dict' in checkpoint:
        print('The weights are the averaged ones of the EMAHook.')
    if not {'dataset_meta', 'CLASSES'} & slim['meta'].keys():
        print('No class names in it: inferencers will show numbers or names of another data set.')


if __name__ == '__main__':
    main()
