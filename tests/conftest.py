import socket

import pytest
import torch
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer


@pytest.fixture(autouse=True)
def seed():
    """Every test draws from the same random stream, alone or in the whole suite."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_managers():
    """MMEngine's global instances end with the test that made them.

    The default scope decides where names are looked up, and runners that start in the same second
    share a logger and with it the log file.
    """
    managers = DefaultScope, MMLogger, MessageHub, Visualizer
    before = [dict(manager._instance_dict) for manager in managers]
    yield
    for manager, instances in zip(managers, before, strict=True):
        manager._instance_dict.clear()
        manager._instance_dict.update(instances)


@pytest.fixture
def free_port():
    """A TCP port on the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]
