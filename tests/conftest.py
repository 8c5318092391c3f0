import socket

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    """Every test draws from the same random stream, alone or in the whole suite."""
    torch.manual_seed(0)


@pytest.fixture
def free_port():
    """A TCP port on the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]
