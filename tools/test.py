"""Evaluate a checkpoint of a detector or a classifier on the test set of its config."""

import launch  # noqa: F401  (first: it sets what OpenMP reads when torch is loaded)

# isort: split
import argparse
import copy
import os

import mmengine
from mmengine.config import Config, ConfigDict
from mmengine.evaluator import DumpResults

from mmstepnet.models import switch_to_deploy
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
from mmstepnet.utils.data_check import check_dataset_cfg, fetch_data
from mmstepnet.utils.distributed import (
    add_launcher_arguments,
    process_group,
    set_rank_variables,
)

_STIFFNESS = ('StiffnessHook', 'StiffnessMetric')


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        '--work-dir', help='where logs and results go (default: work_dirs/CONFIG_NAME)'
    )
    parser.add_argument(
        '--out', '--dump', metavar='FILE', help='write the results to FILE (.pkl, or .json)'
    )
    parser.add_argument(
        '--out-item',
        choices=('pred', 'metrics'),
        default='pred',
        help='what --out writes: every prediction (default) or the metrics',
    )
    parser.add_argument('--amp', action='store_true', help='test in half precision')
    parser.add_argument('--show', action='store_true', help='show pictures in a window')
    parser.add_argument('--show-dir', metavar='DIR', help='save pictures with predictions in DIR')
    parser.add_argument(
        '--interval', type=int, default=1, help='show or save one picture in so many (default: 1)'
    )
    parser.add_argument(
        '--wait-time', type=float, default=2, help='seconds that a window stays (default: 2)'
    )
    parser.add_argument('--tta', action='store_true', help='average over flipped pictures')
    parser.add_argument(
        '--no-pin-memory', action='store_true', help='set pin_memory=False in the data loader'
    )
    add_settings_argument(parser, 'test_dataloader.batch_size=4 or key="[a,b]"')
    add_launcher_arguments(parser)
    args = parser.parse_args()
    if args.out is not None and not args.out.endswith(('.pkl', '.pickle', '.json')):
        parser.error(f'--out must end in .pkl, .pickle or .json, got {args.out}')
    if args.interval < 1:
        parser.error(f'--interval must be at least 1, got {args.interval}')
    if args.out_item == 'pred' and (args.out or '').endswith('.json'):
        parser.error('--out FILE.json is for --out-item metrics; predictions are pickled')
    return args


def apply_arguments(cfg: Config, args: argparse.Namespace) -> None:
    """Bring the command line's settings into the config."""
    cfg.launcher = args.launcher
    set_work_dir(cfg, args.config, args.work_dir)
    cfg.load_from, cfg.resume = args.checkpoint, False
    if cfg.get('test_dataloader') is None:
        fail(f'config {args.config} has no `test_dataloader`')
    loader = cfg.test_dataloader
    set_loader_defaults(loader, cfg)
    if args.no_pin_memory:
        loader.pin_memory = False
    if args.amp:
        cfg.test_cfg.fp16 = True
    if args.show or args.show_dir:
        show(cfg, args)
    if args.tta:
        leave_out_stiffness(cfg)
        add_flip_tta(cfg)


def show(cfg: Config, args: argparse.Namespace) -> None:
    """Turn the visualization hook on; MMDetection and MMPretrain name its arguments differently."""
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        fail('--show and --show-dir need a `visualization` hook in default_hooks of the config')
    detection = type_name(hook.type) == 'DetVisualizationHook'
    if args.tta and not detection:
        fail('--show and --show-dir do not go with --tta here: MMPretrain can not draw its batches')
    hook['draw' if detection else 'enable'] = True
    # Absolute, or MMDetection would put the folder inside the work directory's newest subfolder.
    hook['test_out_dir' if detection else 'out_dir'] = (
        os.path.abspath(args.show_dir) if args.show_dir else None
    )
    hook.show = args.show
    hook.wait_time = args.wait_time
    hook.interval = args.interval
    if detection:
        import mmstepnet.visualization.detection  # noqa: F401  (it needs MMDetection)

        hook.type = 'mmstepnet.IntervalDetVisualizationHook'


def leave_out_stiffness(cfg: Config) -> None:
    """Take out what records stiffness: each version of a picture passes the network by itself."""
    evaluators = cfg.test_evaluator
    evaluators = evaluators if isinstance(evaluators, list) else [evaluators]
    hooks = cfg.get('custom_hooks') or []
    kept = [
        [item for item in items if type_name(item['type']) not in _STIFFNESS]
        for items in (hooks, evaluators)
    ]
    if [len(items) for items in kept] == [len(hooks), len(evaluators)]:
        return
    if not kept[1]:
        fail('--tta does not go with a test_evaluator that measures stiffness alone')
    cfg.custom_hooks, cfg.test_evaluator = kept
    say('stiffness is left out with --tta: a picture passes the network several times')


def add_flip_tta(cfg: Config) -> None:
    """Test-time augmentation as the config says, else the picture and its mirror image."""
    detection = library(cfg) != 'mmpretrain'
    if 'tta_model' not in cfg:
        nms = dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)
        cfg.tta_model = (
            dict(type='DetTTAModel', tta_cfg=nms)
            if detection
            else dict(type='mmpretrain.AverageClsScoreTTA')
        )
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        pack = copy.deepcopy(dataset.pipeline[-1])
        if detection:
            pack.setdefault(
                'meta_keys', ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
            )
            pack['meta_keys'] = (*pack['meta_keys'], 'flip', 'flip_direction')
        # The picture as it is comes first: the merged sample carries the first one's annotations.
        flips = [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)]
        cfg.tta_pipeline = [
            *dataset.pipeline[:-1],
            dict(type='TestTimeAug', transforms=[flips, [pack]]),
        ]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def check(cfg: Config) -> None:
    """Everything that can be known to be wrong before the work directory is touched."""
    check_ops(cfg)
    try:
        check_dataset_cfg(cfg, splits=('test',))
        content = ckpt.read_checkpoint(cfg.load_from)
        model = build_model(cfg)
        if ckpt.is_deployed(content):
            switch_to_deploy(model.eval())
        ckpt.check_same_network(model, content, cfg.load_from)
    except (FileNotFoundError, ValueError) as error:
        fail(reason(error))


def main() -> None:
    args = parse_args()
    set_rank_variables(args.launcher)
    cfg = load_config(args.config, args.cfg_options)
    apply_arguments(cfg, args)
    if local_rank() == 0:
        check(cfg)
        # Results that can't be written must not be lost after the whole evaluation.
        for folder in (cfg.work_dir, args.out and os.path.dirname(args.out), args.show_dir):
            if folder:
                make_folder(folder)
    try:
        fetch_data(cfg, splits=('test',))
    except ValueError as error:
        fail(reason(error))
    with process_group(args.launcher, cfg):
        test(cfg, args)


def test(cfg: Config, args: argparse.Namespace) -> None:
    runner = build_runner(cfg)
    if ckpt.is_deployed(ckpt.read_checkpoint(cfg.load_from)):
        switch_to_deploy(runner.model.eval())
    if args.out and args.out_item == 'pred':
        runner.test_evaluator.metrics.append(dump_metric(cfg, args.out))
    metrics = runner.test()
    if args.out and args.out_item == 'metrics' and runner.rank == 0:
        mmengine.dump(metrics, args.out)


def dump_metric(cfg: Config, path: str) -> DumpResults:
    """A metric that writes predictions; MMDetection's own one also encodes masks."""
    if library(cfg) == 'mmdet':
        from mmdet.evaluation import DumpDetResults

        return DumpDetResults(out_file_path=path)
    return DumpResults(out_file_path=path)


if __name__ == '__main__':
    main()
