"""Validation and training on three processes and on one: awkward numbers of samples."""

import os

import pytest
import torch
import torch.multiprocessing as mp
from mmengine.config import Config
from mmengine.runner import Runner

from mmstepnet.stiffness import read_report, read_samples
from mmstepnet.utils.distributed import process_group

from .test_stiffness_hook import config, run

WORLD = 3
# Samples, batch size of a process, whether the sampler fills the last round up.
CASES = {
    'repetitions in the last round': (7, 3, True),
    'more processes than samples': (2, 4, True),
    'one sample': (1, 1, True),
    'shares that differ': (7, 2, False),
    'a process without samples': (2, 4, False),
}


def validation(folder, weights, size, batch_size, round_up):
    cfg = config(folder, load_from=str(weights))
    cfg.val_dataloader.update(batch_size=batch_size)
    cfg.val_dataloader.dataset.update(indices=size)
    cfg.val_dataloader.sampler.update(round_up=round_up)
    return cfg


def training(folder):
    """Five samples for three processes of four; eleven to validate on."""
    cfg = config(folder)
    cfg.train_dataloader.update(batch_size=4)
    cfg.train_dataloader.dataset.update(indices=5)
    cfg.custom_hooks.insert(0, dict(type='SyncBuffersHook'))
    return cfg


def run_rank(rank, port, folder):
    settings = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=WORLD)
    settings.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in settings.items()})
    os.chdir(folder)  # MMEngine gathers results in a folder that it makes here
    torch.set_num_threads(1)
    group = Config()

    def runner(cfg):
        cfg.update(launcher='pytorch', model_wrapper_cfg=group.model_wrapper_cfg)
        return Runner.from_cfg(cfg)

    with process_group('pytorch', group):
        metrics = {
            name: runner(validation(folder / name, folder / 'weights.pth', *case)).val()
            for name, case in CASES.items()
        }
        trained = runner(training(folder / 'training'))
        trained.train()
        metrics['training'] = trained.val()
        torch.save((metrics, trained.model.module.state_dict()), folder / f'{rank}.pt')
        del trained


@pytest.mark.slow
def test_three_processes_measure_what_one_does(tmp_path, free_port):
    weights = tmp_path / 'weights.pth'
    torch.save(dict(state_dict=run(config(tmp_path / 'first')).model.state_dict()), weights)
    mp.spawn(run_rank, (free_port, tmp_path), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(WORLD)]

    for name, case in CASES.items():
        alone = tmp_path / f'{name}, alone'
        expected = Runner.from_cfg(validation(alone, weights, *case)).val()
        for metrics, _ in ranks:
            assert metrics[name] == pytest.approx(expected, rel=1e-5, nan_ok=True), name
        # Sample by sample: the order is the data set's.
        found = read_samples(tmp_path / name / 'stiffness' / 'val.json')
        for one, other in zip(found, read_samples(alone / 'stiffness' / 'val.json'), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0, msg=name)

    # What the training's last validation measured is what its checkpoint has, on every process.
    folder = tmp_path / 'training'
    cfg = training(tmp_path / 'training, alone')
    cfg.load_from = str(folder / 'epoch_2.pth')
    expected = Runner.from_cfg(cfg).val()
    report = read_report(folder / 'stiffness' / 'epoch_2.json')
    assert report['tns']['mean'] == pytest.approx(expected['stiffness/tns'], rel=1e-5)
    saved = torch.load(folder / 'epoch_2.pth')['state_dict']
    for metrics, state in ranks:
        assert metrics['training'] == pytest.approx(expected, rel=1e-5)
        assert state.keys() == saved.keys()
        for key, value in saved.items():
            assert torch.equal(state[key], value), key
