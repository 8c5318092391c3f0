import pytest
import torch

from mmstepnet.models.backbones import InformationPropagationNet


@pytest.mark.parametrize('kernel', ['metric', 'l2', 'dot'])
@pytest.mark.parametrize('residual', [True, False])
def test_equals_its_description(kernel, residual):
    net = InformationPropagationNet(
        embed_dims=8, depth=3, num_heads=2, kernel=kernel, residual=residual
    )
    x = torch.randn(2, 7, 2)
    h = net.embed(x)
    states = [h]
    for layer in net.layers:
        _, attention = layer(h, return_attention=True)
        value = layer.value(h).view(2, 7, 2, 4).transpose(1, 2)
        moved = layer.proj((attention @ value).transpose(1, 2).reshape(2, 7, 8))
        h = h + moved if residual else moved
        states.append(h)
    torch.testing.assert_close(net(x), net.head(h), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.states(x), states, rtol=1e-4, atol=1e-5)


def test_the_order_of_the_points_does_not_matter_and_other_points_do():
    net = InformationPropagationNet().double()
    x = torch.randn(1, 9, 2, dtype=torch.float64)
    order = torch.randperm(9)
    torch.testing.assert_close(net(x[:, order]), net(x)[:, order])
    assert not torch.allclose(net(x[:, :5]), net(x)[:, :5])


def test_steps_are_heard():
    net = InformationPropagationNet(depth=2)
    heard = []
    for step in net.steps:
        step.recorder = lambda step, x, f, dt: heard.append(x)
    states = net.states(torch.randn(1, 4, 2))
    torch.testing.assert_close(heard, states[:2])
