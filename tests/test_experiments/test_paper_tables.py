import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from mmengine.config import Config

from mmstepnet.experiments import paper_tables, published
from mmstepnet.experiments.paper_tables import TABLES, array_script
from mmstepnet.experiments.runs import ROOT, RunError


@pytest.mark.parametrize('name', TABLES)
def test_every_cell_has_its_config(name):
    table = TABLES[name]
    runs = table.runs('out', [*table.columns], [*table.methods], seeds=2)
    cells = [(run.column, run.row, run.seed) for run in runs]
    assert len(set(cells)) == len(cells) == 2 * len(table.columns) * len(table.methods)
    missing = [run.config for run in runs if not (ROOT / run.config).is_file()]
    assert not missing
    if table.published:
        assert {m: {*row} for m, row in table.published.items()} == {
            m: {*table.columns} for m in table.methods
        }


def test_counts_of_runs():
    sizes = {name: len(t.methods) * len(t.columns) for name, t in TABLES.items()}
    assert sizes == {
        'table1': 27, 'table2': 16, 'table3': 10, 'table4': 27, 'vit': 6, 'digits': 12,
        'cifar10-mini': 5, 'digits-detection': 5, 'bccd': 2,
    }  # fmt: skip


# Pictures a step, epochs, milestones, rate.
SETTINGS = {
    'table1': (128, 164, [81, 122], 0.1),
    'table2': (256, 120, [30, 60, 90], 0.1),
    'table3': (16, 12, [8, 11], 0.02),
    'table4': (128, 164, [81, 122], 0.1),
}


@pytest.mark.parametrize(
    ('name', 'column', 'method'),
    [(name, c, m) for name in SETTINGS for c in TABLES[name].columns for m in TABLES[name].methods],
)
def test_configs_have_the_papers_settings(name, column, method):
    batch_size, epochs, milestones, rate = SETTINGS[name]
    cfg = Config.fromfile(ROOT / TABLES[name].config_file(method, column))
    assert TABLES[name].batch_size == cfg.auto_scale_lr.base_batch_size == batch_size
    assert cfg.train_cfg.max_epochs == epochs
    schedulers = cfg.param_scheduler
    *_, steps = schedulers if isinstance(schedulers, list) else [schedulers]
    assert (steps.type, steps.milestones, steps.gamma) == ('MultiStepLR', milestones, 0.1)
    assert cfg.optim_wrapper.optimizer == dict(type='SGD', lr=rate, momentum=0.9, weight_decay=1e-4)


@pytest.mark.parametrize('method', ['org', 'stepnet'])
@pytest.mark.parametrize('column', ['cifar10', 'cifar100'])
def test_parameters_are_those_that_table_1_prints(method, column):
    count = paper_tables.count_parameters(TABLES['table1'].config_file(method, column))
    assert round(count / 1e6, 2) == published.TABLE1[method][column]['parameters']


def test_srm_alone_is_spared_weight_decay():
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import init_default_scope

    from mmstepnet.registry import MODELS

    for method, spared in (('srm', True), ('se', False)):
        cfg = Config.fromfile(ROOT / TABLES['digits'].config_file(method, 'digits-hard'))
        init_default_scope(cfg.default_scope)
        model = MODELS.build(dict(cfg.model, _scope_=cfg.default_scope))
        groups = build_optim_wrapper(model, cfg.optim_wrapper).param_groups
        free = {id(p) for g in groups if g['weight_decay'] == 0 for p in g['params']}
        gates = {id(p) for name, p in model.named_parameters() if '.step.' in name}
        assert gates and free == (gates if spared else set())


@pytest.fixture
def trained(monkeypatch):
    """Training replaced by two evaluations; returns what it was called with."""
    calls = []

    def train(run, gpus, options, env):
        calls.append((run.row, gpus, options, env))
        return [
            {'step': 1, 'accuracy/top1': 91.0 + run.seed},
            {'step': 2, 'accuracy/top1': 90.0 + run.seed, 'stiffness/tns': 0.25},
        ]

    monkeypatch.setattr(paper_tables, 'train', train)
    monkeypatch.setattr(paper_tables, 'count_parameters', lambda config: 1_749_850)
    return calls


def result(run, content):
    return dict(content, settings=run.settings, seconds=7200.0)


def test_a_row_shows_spread_and_the_paper_s_numbers(tmp_path, trained):
    table = TABLES['table1']
    runs = table.runs(tmp_path, ['cifar10'], ['stepnet'], seeds=3)
    results = [result(run, table.execute(run, 2, {'A': 'b'})) for run in runs]
    json.dumps(results)
    assert trained[0] == ('stepnet', 2, {'train_dataloader.batch_size': 64}, {'A': 'b'})
    (printed,) = table.tables(results, ['cifar10'], ['stepnet', 'se']).values()
    assert printed.header == [
        '', 'method', 'parameters (M)', 'paper', 'seeds', 'last (%)', 'best (%)', 'paper (%)', 'TNS'
    ]  # fmt: skip
    assert printed.rows == [
        ['CIFAR-10', 'StepNet', '1.75', '1.75', '3', '91.00 ± 1.00', '92.00 ± 1.00',
         '95.14 ± 0.24', '0.2500 ± 0.0000'],
        ['CIFAR-10', 'SE', '-', '1.91', '0', '-', '-', '94.26 ± 0.14', '-'],
    ]  # fmt: skip


def test_hours_are_measured_where_runs_are_finished(tmp_path, trained):
    table = TABLES['table1']
    runs = table.runs(tmp_path, ['cifar10', 'stl10'], ['org'], seeds=2)
    assert table.hours(runs, []) == pytest.approx(2 * 1.2 + 2 * 1.1)
    done = result(runs[0], table.execute(runs[0], 4))
    on_cpu = result(runs[1], table.execute(runs[1], 0))
    assert table.hours(runs[1:], [done, on_cpu]) == pytest.approx(8 + 2 * 1.1)


def test_models_are_built_one_at_a_time(tmp_path, trained, monkeypatch):
    building = []

    def count(config):
        building.append(config)
        time.sleep(0.05)
        assert building == [config]
        building.remove(config)
        return 1

    monkeypatch.setattr(paper_tables, 'count_parameters', count)
    table = TABLES['vit']
    runs = table.runs(tmp_path, ['stl10'], ['org', 'stepnet'], seeds=2)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda run: table.execute(run, 0), runs))) == 4


def test_gpus_share_the_batch():
    table = TABLES['table2']
    assert [table.fitting_gpus(n) for n in (0, 1, 3, 6, 9)] == [0, 1, 2, 4, 8]
    assert table.machine_options(8) == {'train_dataloader.batch_size': 32}
    with pytest.raises(ValueError, match='3 GPUs a run do not divide the batch size 256'):
        table.machine_options(3)


def test_detection_shows_every_average_precision(tmp_path, monkeypatch):
    values = dict.fromkeys(TABLES['table3'].metrics.values(), 0.398)
    monkeypatch.setattr(paper_tables, 'train', lambda *_: [{'step': 12, **values}])
    monkeypatch.setattr(paper_tables, 'count_parameters', lambda config: 41_700_000)
    table = TABLES['table3']
    (run,) = table.runs(tmp_path, ['r50'], ['stepnet'], seeds=1)
    results = [result(run, table.execute(run, 8))]
    (printed,) = table.tables(results, ['r50'], ['stepnet']).values()
    assert printed.rows == [
        ['ResNet-50', 'StepNet', '41.70', '1', '39.8 (39.8)', '39.8 (61.2)', '39.8 (41.9)',
         '39.8 (23.8)', '39.8 (43.1)', '39.8 (51.0)', '-']
    ]  # fmt: skip


def test_small_detection_tables_have_no_paper_beside_them(tmp_path, monkeypatch):
    table = TABLES['bccd']
    values = {'coco/bbox_mAP': 0.55, 'coco/bbox_mAP_50': 0.88, 'coco/bbox_mAP_75': 0.6}
    monkeypatch.setattr(paper_tables, 'train', lambda run, *_: [
        {'step': 12, **{k: v + run.seed / 100 for k, v in values.items()}, 'stiffness/tns': 0.25}
    ])  # fmt: skip
    monkeypatch.setattr(paper_tables, 'count_parameters', lambda config: 12_000_000)
    runs = table.runs(tmp_path, ['bccd'], ['org'], seeds=3)
    results = [result(run, table.execute(run, 0)) for run in runs]
    (printed,) = table.tables(results, ['bccd'], ['org', 'stepnet']).values()
    assert printed.header == [
        '', 'method', 'parameters (M)', 'seeds', 'AP', 'AP50', 'AP75', 'TNS'
    ]  # fmt: skip
    assert printed.rows == [
        ['BCCD', 'Org', '12.00', '3', '56.0 ± 1.0', '89.0 ± 1.0', '61.0 ± 1.0', '0.2500 ± 0.0000'],
        ['BCCD', 'StepNet', '-', '0', '-', '-', '-', '-'],
    ]  # fmt: skip


def test_correlation_over_methods(tmp_path):
    table = TABLES['digits']
    runs = table.runs(tmp_path, ['digits-hard'], ['org', 'se', 'eca'], seeds=1)
    results = [
        result(run, dict(metrics=dict(last=a, best=a, tns=t, parameters=1), gpus=0))
        for run, a, t in zip(runs, (70.0, 72.0, 71.0), (0.1, 0.2, 0.3), strict=True)
    ]
    tables = table.tables(results, ['digits-hard'], ['org', 'se', 'eca', 'srm'])
    correlation = tables['digits: TNS against accuracy, over methods']
    assert [row[:2] for row in correlation.rows] == [
        ['Pearson', '0.500'], ['Spearman', '0.500'], ['Kendall', '0.333']
    ]  # fmt: skip
    assert len(table.tables(results[:2], ['digits-hard'], ['org', 'se'])) == 1


def test_array_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = array_script(
        ['python', 'a b.py', '--task'], [0, 1, 2, 5, 7, 8], tmp_path / 'logs', 't', 4,
        options=['--partition=gpu'],
    )  # fmt: skip
    lines = script.splitlines()
    assert lines[0] == '#!/usr/bin/env bash'
    assert '#SBATCH --array=0-2,5,7-8' in lines
    assert '#SBATCH --gres=gpu:4' in lines and '#SBATCH --cpus-per-task=20' in lines
    assert lines.index('#SBATCH --partition=gpu') < lines.index('set -euo pipefail')
    assert lines[-1] == 'exec python \'a b.py\' --task "$SLURM_ARRAY_TASK_ID"'
    assert f'#SBATCH --output={tmp_path}/logs/%A_%a.log' in lines
    script = array_script(['python'], [0], tmp_path / 'my logs', 't', 1)
    assert f'#SBATCH --output="{tmp_path}/my logs/%A_%a.log"' in script.splitlines()


def test_a_failed_training_is_no_result(tmp_path, monkeypatch):
    def train(*_):
        raise RunError('out of memory')

    monkeypatch.setattr(paper_tables, 'train', train)
    table = TABLES['vit']
    with pytest.raises(RunError, match='out of memory'):
        table.execute(table.runs(tmp_path, ['stl10'], ['org'], 1)[0], 1)
