import argparse

from mmstepnet.experiments import digits_attention


def result(row, seed, layers, **metrics):
    return dict(settings=dict(row=row, seed=seed), layers=layers, metrics=metrics)


def test_tables_by_hand():
    found = {'stiffness/tns': 0.5, 'stiffness/nsi_mean': 0.25, 'parameters': 1234}
    layers = [
        dict(asymmetry=[a, 1], negative=[0.5, 0], triangle=[0, 0.1], neighbours=[3, 4],
             spread=[0.25, 0.5])
        for a in (0.1, 0.3)
    ]  # fmt: skip
    results = [
        result('resnet20', 0, {}, last=90.0, best=91.0, **found),
        result('vit-l2', 0, layers[0], last=80.0, best=82.0, **found),
        result('vit-l2', 1, layers[1], last=84.0, best=84.0, **found),
    ]
    tables = digits_attention._tables(results, argparse.Namespace())
    accuracy, geometry = tables.values()
    assert [row[:5] for row in accuracy.rows] == [
        ['ResNet-20', '1,234', '1', '90.00', '91.00'],
        ['ViT, L2 attention', '1,234', '2', '82.00 ± 2.83', '83.00 ± 1.41'],
    ]
    assert accuracy.rows[1][5:] == ['0.500 ± 0.000', '0.250 ± 0.000']
    # In percent where the header says so.
    assert [row[:5] for row in geometry.rows] == [
        ['ViT, L2 attention', '1', '0.200 ± 0.141', '50.00 ± 0.00', '0.00 ± 0.00'],
        ['ViT, L2 attention', '2', '1.000 ± 0.000', '0.00 ± 0.00', '10.00 ± 0.00'],
    ]
    assert geometry.rows[0][5:] == ['3.00 ± 0.00', '0.250 ± 0.000']
