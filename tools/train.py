"""Train a detector or a classifier from an MMDetection, MMPretrain or mmstepnet config."""

import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from mmengine.config import Config
from mmengine.runner import EpochBasedTrainLoop

from mmstepnet.utils import checkpoint as ckpt
from mmstepnet.utils.command_line import (
    ArgumentParser,
    add_settings_argument,
    build_model,
    build_runner,
    check_ops,
    fail,
    library,
    load_config,
    local_rank,
    make_folder,
    reason,
    say,
    set_loader_defaults,
    set_work_dir,
    type_name,
)
from mmstepnet.utils.data_check import check_class_counts, check_dataset_cfg, fetch_data
from mmstepnet.utils.distributed import (
    add_launcher_arguments,
    global_rank,
    has_gpu,
    process_group,
    set_rank_variables,
    world_size,
)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument(
        '--work-dir', help='where logs and checkpoints go (default: work_dirs/CONFIG_NAME)'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='go on from CHECKPOINT, or, without a value, from the newest readable one in the work '
        'directory; where there is none, training starts from the beginning',
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision (needs a GPU)')
    parser.add_argument(
        '--no-validate', action='store_true', help='do not evaluate during training'
    )
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by total batch size / auto_scale_lr.base_batch_size',
    )
    parser.add_argument(
        '--no-pin-memory', action='store_true', help='set pin_memory=False in all data loaders'
    )
    parser.add_argument(
        '--no-persistent-workers',
        action='store_true',
        help='set persistent_workers=False in all data loaders; the training loader never has them',
    )
    add_settings_argument(parser, 'train_cfg.max_epochs=2 or key="[a,b]"')
    add_launcher_arguments(parser)
    return parser.parse_args()


def apply_arguments(cfg: Config, args: argparse.Namespace) -> None:
    """Bring the command line's settings into the config."""
    cfg.launcher = args.launcher
    set_work_dir(cfg, args.config, args.work_dir)
    if cfg.get('train_dataloader') is None or cfg.get('optim_wrapper') is None:
        fail(f'config {args.config} has no `train_dataloader` and `optim_wrapper` to train with')

    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.amp:
        if not has_gpu():
            fail('--amp needs a GPU, and none is usable here')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            fail(f'--auto-scale-lr needs auto_scale_lr.base_batch_size in {args.config}')
        cfg.auto_scale_lr.enable = True

    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        if (loader := cfg.get(name)) is None:
            continue
        set_loader_defaults(loader, cfg)
        if library(cfg) == 'mmpretrain':
            loader.setdefault('persistent_workers', loader.num_workers > 0)
        if args.no_pin_memory:
            loader.pin_memory = False
        if args.no_persistent_workers:
            loader.persistent_workers = False


def make_resumable(cfg: Config) -> None:
    """Let the run survive being killed: checkpoints whole or not at all, random numbers by epoch.

    See ``AtomicCheckpointHook`` and ``ExactResumeHook``.
    """
    hooks = dict(cfg.get('default_hooks') or {})
    checkpoint = hooks.get('checkpoint', dict(type='CheckpointHook', interval=1))
    if checkpoint is not None and type_name(checkpoint.get('type', '')) == 'CheckpointHook':
        hooks['checkpoint'] = dict(checkpoint, type='mmstepnet.AtomicCheckpointHook')
    cfg.default_hooks = hooks
    custom = list(cfg.get('custom_hooks') or [])
    if not any(hook['type'] == 'mmstepnet.ExactResumeHook' for hook in custom):
        custom.append(dict(type='mmstepnet.ExactResumeHook'))
    cfg.custom_hooks = custom
    cfg.train_dataloader.persistent_workers = False
    cfg.train_dataloader.setdefault('worker_init_fn', dict(type='mmstepnet.keep_worker_seed'))


def set_resume(cfg: Config, resume: str | None) -> dict | None:
    """Find the checkpoint to go on from and take its seed over.

    Returns:
        dict | None: The checkpoint's content; None where the run starts from the beginning.
    """
    if resume is None:
        return None
    try:
        if resume == 'auto':
            path, content, problems = ckpt.newest_checkpoint(cfg.work_dir)
            for problem in problems:
                say(f'{problem}; the one before it is used')
            if path is None:
                say(f'no checkpoint in {cfg.work_dir}: training starts from the beginning')
                return None
        else:
            path, content = resume, ckpt.read_checkpoint(resume)
    except ckpt.CheckpointError as error:
        fail(error)
    meta = content.get('meta', {})
    if 'optimizer' not in content or 'epoch' not in meta:
        fail(
            f'checkpoint {path} holds no optimizer state, so training can not be resumed from it; '
            f'to start from its weights, use --cfg-options load_from={path}'
        )
    written = meta.get('world_size', 0) * meta.get('batch_size', 0)
    total = world_size() * cfg.train_dataloader.get('batch_size', 0)
    if written and total and written != total:
        fail(
            f'checkpoint {path} was written with {meta["world_size"]} processes x '
            f'{meta["batch_size"]} samples, this run has {world_size()} x '
            f'{cfg.train_dataloader.batch_size}: the learning rate in the checkpoint does not fit. '
            'Resume with the same product (train_dataloader.batch_size can be changed)'
        )
    cfg.resume, cfg.load_from = True, path
    if meta.get('seed') is not None:
        # The sampler is built before MMEngine takes the seed over, and would use another one.
        cfg.randomness = dict(cfg.get('randomness', {}), seed=meta['seed'])
    return content


def check(cfg: Config, resumed: dict | None) -> None:
    """Everything that can be known to be wrong before the work directory is touched."""
    check_ops(cfg)
    try:
        check_dataset_cfg(cfg)
    except (FileNotFoundError, ValueError) as error:
        fail(reason(error))
    model = build_model(cfg)
    try:
        check_class_counts(model, cfg)
    except ValueError as error:
        fail(reason(error))
    try:
        if resumed is not None:
            ckpt.check_same_network(model, resumed, cfg.load_from)
        elif cfg.get('load_from'):
            content = ckpt.read_checkpoint(cfg.load_from)
            ckpt.check_same_backbone(model, content, cfg.load_from)
        else:
            for path in pretrained_files(cfg.model):
                ckpt.read_checkpoint(path)
    except ckpt.CheckpointError as error:
        fail(error)


def pretrained_files(node: object) -> list[str]:
    """Local files that any ``init_cfg`` of a model config names."""
    if isinstance(node, list | tuple):
        return [path for item in node for path in pretrained_files(item)]
    if not isinstance(node, dict):
        return []
    if node.get('type') == 'Pretrained' and '://' not in str(node.get('checkpoint')):
        return [node['checkpoint']]
    return pretrained_files(list(node.values()))


def main() -> None:
    args = parse_args()
    set_rank_variables(args.launcher)
    cfg = load_config(args.config, args.cfg_options)
    apply_arguments(cfg, args)
    make_resumable(cfg)
    if cfg.get('randomness', {}).get('deterministic'):
        # Some versions of torch ask for it.
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    resumed = set_resume(cfg, args.resume)
    if local_rank() == 0:
        check(cfg, resumed)
        make_folder(cfg.work_dir)
    # The file that it may be mapped from can go when newer ones are there.
    del resumed
    try:
        fetch_data(cfg)
    except ValueError as error:
        fail(reason(error))
    with lock(cfg.work_dir), process_group(args.launcher, cfg):
        train(cfg)


@contextlib.contextmanager
def lock(work_dir: str) -> Iterator[None]:
    """Keep a second training out of the work directory, where each would write over the other's
    checkpoints. The lock ends with this process, however it ends; data loaders don't inherit it.
    """
    with contextlib.ExitStack() as stack:
        if global_rank() == 0:
            file = stack.enter_context(open(os.path.join(work_dir, '.training'), 'w'))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Anything else is a file system without locks.
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    fail(
                        f'another training is running in {work_dir}: wait for it or end it, or '
                        'choose another --work-dir'
                    )
        yield


def train(cfg: Config) -> None:
    """Build the runner and train, but not for epochs without a batch, which end without a word."""
    runner = build_runner(cfg)
    loop = runner.train_loop
    if isinstance(loop, EpochBasedTrainLoop) and len(loop.dataloader) == 0:
        loader = loop.dataloader
        fail(
            f'train_dataloader has no batch: {len(loader.dataset)} samples, {runner.world_size} '
            f'processes x batch size {loader.batch_sampler.batch_size}, and drop_last=True'
        )
    runner.train()


if __name__ == '__main__':
    main()
