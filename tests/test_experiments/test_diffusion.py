import argparse

import pytest

from mmstepnet.experiments import diffusion
from mmstepnet.experiments.runs import Run

ARGS = argparse.Namespace(out=None, seeds=2)


def result(row, column, seed=0, **content):
    return dict(settings=dict(row=row, column=column, seed=seed), **content)


def test_a_step_on_the_uniform_circle_errs_by_the_square_of_eps(tmp_path):
    found = diffusion._execute(Run('circle, uniform', 'quadrature', 0, tmp_path), ARGS)
    assert found['metrics']['order'] == pytest.approx(2, abs=0.01)
    curves = found['curves']
    assert found['metrics']['constant'] == curves['error'][-1] / curves['eps'][-1] ** 2
    assert len(curves['eps']) == len(curves['error']) == 13


def test_tables_by_hand():
    exact = result('circle, uniform', 'quadrature', metrics=dict(order=1.9996, constant=0.12345))
    # (A h - h) / (eps / 2): errors of the generator 2 and 0.4, then 4 and 0.2.
    random = [
        result('250 points', 'random', seed, curves=dict(eps=[0.1, 0.5], error=errors))
        for seed, errors in enumerate(([0.1, 0.1], [0.2, 0.05]))
    ]
    first, second = diffusion._tables([exact, *random], ARGS).values()
    assert first.rows == [['circle, uniform', '2.000', '0.1235']]
    (row,) = second.rows
    assert row == ['250', '2', '0.300 ± 0.141', '0.500']
