"""Attention and convolution on the digits: accuracy, stiffness and geometry of attention."""

import argparse
from pathlib import Path

from mmstepnet.utils.text_table import Table, spread

from .experiment import Experiment, metric, select
from .runs import ROOT, Run, RunError, epoch_losses, last_and_best, seconds_logged, train

NETWORKS = {
    'resnet20': ('ResNet-20', 'configs/digits/resnet20_org_12e_digits.py'),
    'resnet20-stepnet': ('ResNet-20 + StepNet', 'configs/digits/resnet20_stepnet_12e_digits.py'),
    'vit-dot': ('ViT, self-attention', 'configs/attention/vit_dot_12e_digits.py'),
    'vit-l2': ('ViT, L2 attention', 'configs/attention/vit_l2_12e_digits.py'),
    'vit-metric': ('ViT, metric attention', 'configs/attention/vit_metric_12e_digits.py'),
    'vit-metric-scaled': (
        'ViT, metric attention / 16',
        'configs/attention/vit_metric_scaled_12e_digits.py',
    ),
    'attentionconv': (
        'AttentionConvNet',
        'configs/attention/attentionconv_quadratic_12e_digits.py',
    ),
}
TOP1 = 'accuracy/top1'


def _runs(args: argparse.Namespace) -> list[Run]:
    # Seed by seed, so that a table of fewer seeds is there early.
    return [
        Run(row, 'digits', seed, args.out, config)
        for seed in range(args.seeds)
        for row, (_, config) in NETWORKS.items()
    ]


def _execute(run: Run, args: argparse.Namespace) -> dict:
    found = train(run)
    metrics = last_and_best(found, TOP1)
    metrics |= {k: v for k, v in found[-1].items() if k.startswith('stiffness/')}
    curves = dict(
        step=[line['step'] for line in found],
        accuracy=[line[TOP1] for line in found],
        loss=epoch_losses(run.work_dir),
    )
    model, images = _load_trained(run)
    metrics['parameters'] = sum(p.numel() for p in model.parameters())
    return dict(
        metrics=metrics,
        curves=curves,
        layers=_layer_metrics(model, images),
        seconds=round(seconds_logged(run.work_dir), 2),
    )


def _load_trained(run: Run) -> tuple:
    """The trained classifier of a run in evaluation mode, and its normalised test pictures."""
    from mmengine.config import Config
    from mmengine.dataset import pseudo_collate
    from mmengine.registry import DATASETS, init_default_scope

    from mmstepnet.registry import MODELS
    from mmstepnet.utils.checkpoint import newest_checkpoint

    cfg = Config.fromfile(ROOT / run.config)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(
        dict(cfg.model, _scope_=cfg.default_scope, data_preprocessor=cfg.data_preprocessor)
    )
    path, content, _ = newest_checkpoint(run.work_dir)
    if path is None:
        raise RunError(f'{run.work_dir} holds no checkpoint that can be read')
    model.load_state_dict(content['state_dict'])
    model.eval()
    dataset = DATASETS.build(dict(cfg.test_dataloader.dataset, _scope_=cfg.default_scope))
    batch = pseudo_collate([dataset[i] for i in range(len(dataset))])
    return model, model.data_preprocessor(batch)['inputs']


def _layer_metrics(model, images) -> dict[str, list[float]]:
    """Geometry of the attention and clustering of the tokens by layer, mean over test pictures.

    Empty for a network without :class:`MetricAttention`.
    """
    from mmstepnet.analysis.attention_geometry import (
        attention_geometry,
        token_clustering,
        trace_layers,
    )
    from mmstepnet.models.layers import MetricAttention

    if not any(isinstance(module, MetricAttention) for module in model.modules()):
        return {}
    scores, states = trace_layers(model.backbone, model.backbone.layers, images)
    geometry = [attention_geometry(layer) for layer in scores]
    found = {
        name: [getattr(layer, name).mean().item() for layer in geometry]
        for name in ('asymmetry', 'negative', 'triangle', 'neighbours', 'spread')
    }
    clustering = token_clustering(states)
    for name in ('similarity', 'spread', 'rank', 'clusters'):
        found[f'token_{name}'] = getattr(clustering, name).mean(1).tolist()
    return found


def _tables(results: list[dict], args: argparse.Namespace) -> dict[str, Table]:
    accuracy = Table(
        ['network', 'parameters', 'seeds', 'accuracy (%)', 'best epoch (%)', 'TNS', 'mean NSI']
    )
    geometry = Table(
        ['network', 'layer', 'asymmetry', 'negative (%)', 'triangle (%)', 'neighbours', 'mixing']
    )
    for row, (name, _) in NETWORKS.items():
        chosen = select(results, row=row)
        if not chosen:
            continue
        accuracy.rows.append(
            [
                name,
                f'{chosen[0]["metrics"]["parameters"]:,}',
                str(len(chosen)),
                spread(metric(chosen, 'last')),
                spread(metric(chosen, 'best')),
                spread(metric(chosen, 'stiffness/tns'), 3),
                spread(metric(chosen, 'stiffness/nsi_mean'), 3),
            ]
        )
        for layer in range(len(chosen[0]['layers'].get('asymmetry', []))):
            values = {
                key: [result['layers'][key][layer] for result in chosen]
                for key in ('asymmetry', 'negative', 'triangle', 'neighbours', 'spread')
            }
            geometry.rows.append(
                [
                    name,
                    str(layer + 1),
                    spread(values['asymmetry'], 3),
                    spread([100 * v for v in values['negative']], 2),
                    spread([100 * v for v in values['triangle']], 2),
                    spread(values['neighbours'], 2),
                    spread(values['spread'], 3),
                ]
            )
    return {
        'Digits: accuracy on 450 digits of other writers, and stiffness': accuracy,
        'Digits: what the attention layers measure': geometry,
    }


def _figures(results: list[dict], out: Path) -> list[Path]:
    import torch

    from mmstepnet.visualization.attention_figures import depth_figure, training_curves_figure
    from mmstepnet.visualization.figures import save_figure

    chosen = {name: select(results, row=row) for row, (name, _) in NETWORKS.items()}
    chosen = {name: found for name, found in chosen.items() if found}
    groups = {name: [r['curves'] for r in found] for name, found in chosen.items()}
    files = save_figure(training_curves_figure(groups, xlabel='epoch'), out / 'digits_training')
    vits = {name: found for name, found in chosen.items() if found[0]['layers']}
    labels = dict(
        similarity='mean cosine similarity of tokens',
        rank='effective rank of the tokens',
        clusters='clusters of tokens',
    )
    for key, label in labels.items() if vits else ():
        series = {
            name: torch.tensor([r['layers'][f'token_{key}'] for r in found]).T
            for name, found in vits.items()
        }
        files += save_figure(depth_figure(series, label), out / f'digits_token_{key}')
    for row, side in (('attentionconv', 8), ('vit-metric', 4), ('vit-dot', 4)):
        if found := select(results, row=row, column='digits'):
            run = Run(**found[0]['settings'], root=out.parent)
            figure = _attention_maps(run, side)
            files += save_figure(figure, out / f'digits_attention_{row}')
    return files


def _attention_maps(run: Run, side: int):
    """What each head of a trained network gives to the query near a test picture's middle."""
    import torch

    from mmstepnet.models.layers import MetricAttention, RelativeAttention2d
    from mmstepnet.visualization.attention_figures import attention_maps_figure

    model, images = _load_trained(run)
    weights = []

    def note(layer, args):
        # forward itself, since calling the layer would run this hook again.
        weights.append(layer.forward(args[0], return_attention=True)[1][0])

    for layer in model.modules():
        if isinstance(layer, MetricAttention | RelativeAttention2d):
            layer.register_forward_pre_hook(note)
    with torch.no_grad():
        model.backbone(images[:1])
    return attention_maps_figure(weights, (side // 2, side // 2), (side, side), images[0, 0])


EXPERIMENT = Experiment(
    help='attention and convolution on the digits: accuracy, stiffness, geometry of attention',
    runs=_runs,
    execute=_execute,
    tables=_tables,
    figures=_figures,
    seeds=5,
)
