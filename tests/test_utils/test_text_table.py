import math

import pytest

from mmstepnet.utils.text_table import Table, mean_and_std, spread


def test_spread():
    mean, std = mean_and_std([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert std == pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2))
    assert spread([1.0, 2.0, 4.0]) == '2.33 ± 1.53'
    assert spread([2.0], 1) == '2.0'
    assert spread([]) == '-'


def test_table(tmp_path):
    table = Table(['name', 'x'], [['a, b', '1'], ['c', '22']])
    assert table.text() == 'name  x\na, b  1\nc     22'
    assert table.markdown() == '| name | x |\n| --- | --- |\n| a, b | 1 |\n| c | 22 |'
    assert table.csv() == 'name,x\n"a, b",1\nc,22'
    files = table.write(tmp_path / 'out' / 'table')
    assert [f.name for f in files] == ['table.txt', 'table.md', 'table.csv']
    assert files[1].read_text() == table.markdown() + '\n'
