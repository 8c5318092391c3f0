import pytest
import torch
from torch import nn

from mmstepnet.evaluation.metrics import StiffnessMetric
from mmstepnet.models.layers import ResidualStep
from mmstepnet.stiffness import total_neural_stiffness


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.step = ResidualStep()

    def forward(self, x):
        return self.step(x, self.layer(x))


@pytest.fixture
def model():
    return nn.Sequential(*(Block() for _ in range(4))).double().requires_grad_(False)


def feed(metric, model, batches):
    for batch in batches:
        with metric.record(model):
            metric.process(batch, list(model(batch)))


def nsi_by_hand(model, x):
    columns = []
    for block in model:
        f = block.layer(x)
        columns.append(f.norm(dim=1) / x.norm(dim=1))
        x = x + f
    return torch.stack(columns[1:], dim=1)


def test_a_loop_of_ones_own(model):
    x = torch.randn(7, 6, dtype=torch.float64)
    metric = StiffnessMetric(thresholds=(0.2, 0.5))
    feed(metric, model, x.split(3))
    values = metric.evaluate(size=7)
    nsi = nsi_by_hand(model, x)
    tns = total_neural_stiffness(nsi, torch.zeros(3, dtype=torch.int64))
    threshold = (1.2 * nsi.mean(1, keepdim=True)).clamp(min=0.5)
    expected = dict(
        tns=tns.mean,
        tns_std_error=tns.std_error,
        nsi_mean=nsi.mean(),
        nsi_max=nsi.max(),
        proportion=(nsi >= threshold).double().mean(),
    )
    assert values == pytest.approx({f'stiffness/{k}': v.item() for k, v in expected.items()})
    measurement = metric.measurement
    torch.testing.assert_close(measurement.nsi, nsi)
    assert measurement.dt is None and measurement.names == ['1', '2', '3']
    report = measurement.report(model='toy')
    assert report['num_samples'] == 7 and report['dt_mean'] is None


def on_all_processes(monkeypatch, metrics, size):
    """Evaluate with one metric for each process."""
    parts = []
    for metric in metrics:
        part = metric.results and (
            torch.cat(metric.results),
            metric._recorder.names,
            metric._recorder.stages,
        )
        parts.append(part or None)
    monkeypatch.setattr(
        'mmstepnet.evaluation.metrics.stiffness_metric.all_gather_object', lambda _: parts
    )
    return [metric.evaluate(size) for metric in metrics]


@pytest.mark.parametrize('world', [1, 2, 3])
@pytest.mark.parametrize('pad', [True, False])
@pytest.mark.parametrize('batch_size', [1, 2, 4])
def test_any_number_of_processes(model, monkeypatch, world, pad, batch_size):
    """Dealt out as mmengine's DefaultSampler does, with and without filling up the last round."""
    x = torch.randn(11, 6, dtype=torch.float64)
    size = -(-len(x) // world) * world if pad else len(x)
    indices = [i % len(x) for i in range(size)]
    metrics = []
    for rank in range(world):
        metrics.append(StiffnessMetric())
        feed(metrics[-1], model, x[indices[rank::world]].split(batch_size))
    values = on_all_processes(monkeypatch, metrics, size=len(x))
    assert all(value == values[0] for value in values)
    for metric in metrics:
        torch.testing.assert_close(
            metric.measurement.nsi, nsi_by_hand(model, x), rtol=1e-12, atol=0
        )


def test_a_process_without_samples(model, monkeypatch):
    x = torch.randn(1, 6, dtype=torch.float64)
    metrics = StiffnessMetric(), StiffnessMetric()
    feed(metrics[0], model, [x])
    values = on_all_processes(monkeypatch, metrics, size=1)
    assert values[0]['stiffness/nsi_max'] == values[1]['stiffness/nsi_max']
    for metric in metrics:
        torch.testing.assert_close(metric.measurement.nsi, nsi_by_hand(model, x))
        assert metric.measurement.names == ['1', '2', '3']


def test_it_has_to_see_the_model():
    with pytest.raises(RuntimeError, match=r"type='mmstepnet\.StiffnessHook'"):
        StiffnessMetric().process(None, [0])


def test_one_forward_pass_per_sample(model):
    metric = StiffnessMetric()
    with metric.record(model), pytest.raises(RuntimeError, match='augmentation'):
        x = torch.randn(2, 6, dtype=torch.float64)
        model(x)
        model(x.flip(1))
        metric.process(x, [0, 1])


def test_nothing_seen(model):
    metric = StiffnessMetric()
    with metric.record(model):
        pass
    with pytest.raises(ValueError, match='nothing was recorded'):
        metric.evaluate(size=3)


def test_samples_without_nsi(model):
    x = torch.randn(5, 6, dtype=torch.float64)
    x[3] = float('nan')
    metric = StiffnessMetric()
    feed(metric, model, x.split(2))
    with pytest.raises(ValueError, match='block 1, sample 3'):
        metric.evaluate(size=5)
    metric = StiffnessMetric(nan_policy='omit')
    feed(metric, model, x.split(2))
    metric.evaluate(size=5)
    assert metric.measurement.num_omitted == 1
    torch.testing.assert_close(metric.measurement.nsi, nsi_by_hand(model, x[[0, 1, 2, 4]]))
    feed(metric, model, [x[3:4]])
    with pytest.raises(ValueError, match='none of the 1 samples'):
        metric.evaluate(size=1)
