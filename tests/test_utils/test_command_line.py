import argparse

import pytest
import torch

from mmstepnet.utils.command_line import ArgumentParser, usable_device, use_device


def test_devices_of_a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: False)
    assert usable_device('cpu') == 'cpu'
    for name in ('cuda:7', 'cuda', 'quark'):
        with pytest.raises(argparse.ArgumentTypeError) as error:
            usable_device(name)
        assert str(error.value) == f'no {name} on this machine; it has cpu'


def test_devices_of_a_machine_with_two_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True)
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda: torch.device('cuda'))
    monkeypatch.setattr(torch.accelerator, 'device_count', lambda: 2)
    assert [usable_device(n) for n in ('cpu', 'cuda', 'cuda:1')] == ['cpu', 'cuda', 'cuda:1']
    with pytest.raises(argparse.ArgumentTypeError, match=r'no cuda:2 .* cpu, cuda, cuda:0, cuda:1'):
        usable_device('cuda:2')


def test_a_gpu_that_was_named_is_the_one_that_is_waited_for(monkeypatch):
    chosen = []
    monkeypatch.setattr('torch.cuda.set_device', lambda device: chosen.append(str(device)))
    for name in ('cpu', 'cuda', 'cuda:1'):
        use_device(name)
    # Torch refuses one without a number.
    assert chosen == ['cuda:1']


@pytest.mark.parametrize(('rank', 'code', 'said'), [('0', 2, True), ('1', 1, False)])
def test_bad_arguments_are_said_by_one_process(monkeypatch, capsys, rank, code, said):
    monkeypatch.setenv('LOCAL_RANK', rank)
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    with pytest.raises(SystemExit) as ended:
        ArgumentParser().parse_args(['--unknown'])
    assert ended.value.code == code
    assert ('unrecognized arguments: --unknown' in capsys.readouterr().err) == said
