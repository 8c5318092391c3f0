import pytest
import torch

from mmstepnet.stiffness.report import build_report


@pytest.fixture
def make_report():
    """Return a maker of (report, nsi, dt), reproducible by seed."""

    def make(depths=(2, 3), samples=6, seed=0, with_dt=True, **info):
        generator = torch.Generator().manual_seed(seed)
        stages = [stage for stage, depth in enumerate(depths, 1) for _ in range(depth)]
        names = [f'layer{stage}.{index}' for index, stage in enumerate(stages)]
        shape = (samples, len(stages))
        nsi = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        dt = torch.rand(shape, generator=generator, dtype=torch.float64) if with_dt else None
        info = {'model': 'net', 'dataset': 'digits/val', **info}
        return build_report(nsi, stages, names, 'attention', dt, **info), nsi, dt

    return make
