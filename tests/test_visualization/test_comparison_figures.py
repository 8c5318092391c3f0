import numpy as np
import pytest

from mmstepnet.visualization import (
    accuracy_figure,
    figure_to_image,
    runs_figure,
    save_comparison_figures,
    tns_figure,
)
from mmstepnet.visualization.labels import four_digits, short_names, shorten, with_error


def make_models(make_report, accuracies):
    return [
        make_report(model=model, seed=seed, metrics={'accuracy/top1': accuracy})[0]
        for seed, (model, accuracy) in enumerate(accuracies)
    ]


def test_bars_are_tns_with_its_standard_error(make_report):
    reports = make_models(make_report, [('a', 1), ('b', 2)])
    figure = tns_figure(reports)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ['a', 'b']
    for bar, errors, report in zip(axes.patches, axes.collections, reports, strict=True):
        mean, error = report['tns']['mean'], report['tns']['std_error']
        assert bar.get_width() == pytest.approx(mean)
        (whisker,) = errors.get_segments()
        np.testing.assert_allclose(whisker[:, 0], [mean - error, mean + error])
    assert 'standard error over samples' in axes.get_xlabel()


def test_bars_of_several_runs_are_their_mean_and_standard_deviation(make_report):
    reports = make_models(make_report, [('a', 1), ('a', 2), ('b', 3)])
    axes = tns_figure(reports).axes[0]
    values = [report['tns']['mean'] for report in reports]
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, [np.mean(values[:2]), values[2]])
    whiskers = [c.get_segments()[0][:, 0] for c in axes.collections if len(c.get_segments())]
    spread = np.std(values[:2], ddof=1)
    np.testing.assert_allclose(whiskers, [[widths[0] - spread, widths[0] + spread]])
    assert 'standard deviation over runs' in axes.get_xlabel()


def test_runs_stand_in_one_panel_a_model_and_share_an_axis(make_report):
    reports = make_models(make_report, [('a', 1), ('b', 2), ('a', 3)])
    first, second = (axes for axes in runs_figure(reports).axes if axes.lines)
    curves = [line.get_ydata() for line in first.lines if len(line.get_ydata())]
    expected = [reports[0]['nsi_mean'], reports[2]['nsi_mean']]
    expected.append(np.mean(expected, axis=0))
    expected = [part for values in expected for part in (values[:2], values[2:])]
    for curve, values in zip(curves, expected, strict=True):
        np.testing.assert_allclose(curve, values)
    highest = max(max(report['nsi_mean']) for report in reports)
    assert first.get_ylim() == second.get_ylim() == (0, pytest.approx(1.05 * highest))


def test_rank_correlation_is_that_of_the_models(make_report):
    reports = make_models(make_report, [('a', 1), ('b', 2), ('c', 3), ('c', 5)])
    for report, tns in zip(reports, (1.0, 2.0, 2.0, 8.0), strict=True):
        report['tns'] = {'mean': tns, 'std_error': 0.1}
    axes = accuracy_figure(reports, 'accuracy/top1').axes[0]
    # Means: TNS 1, 2, 5 and accuracy 1, 2, 4, in the same order: 2 of 3! orders do as well.
    assert axes.get_title(loc='left') == (
        '3 models: Kendall τ = 1.00 (p = 0.33),\nSpearman ρ = 1.00 (p = 0.33)'
    )
    assert axes.get_ylabel() == 'accuracy/top1 (%)'
    filled = [line.get_xydata()[0].tolist() for line in axes.lines if line.get_markersize() > 5]
    assert filled == [[1, 1], [2, 2], [5, 4]]


def test_two_models_have_no_rank_correlation(make_report):
    reports = make_models(make_report, [('a', 1), ('b', 2)])
    title = accuracy_figure(reports, 'accuracy/top1').axes[0].get_title(loc='left')
    assert title == 'No rank correlation: 2 of at least 3 models'


def test_equal_accuracies_have_no_rank_correlation(make_report):
    reports = make_models(make_report, [('a', 1), ('b', 1), ('c', 1)])
    title = accuracy_figure(reports, 'accuracy/top1').axes[0].get_title(loc='left')
    assert title == '3 models: Kendall τ undefined,\nSpearman ρ undefined'


@pytest.mark.parametrize('value', [None, 'high', True])
def test_metric_must_be_a_number(make_report, value):
    reports = make_models(make_report, [('a', 1), ('b', value)])
    with pytest.raises(ValueError, match=r"'accuracy/top1' must be a number .*for model 'b'"):
        accuracy_figure(reports, 'accuracy/top1')


def test_reports_are_needed_and_named(make_report):
    with pytest.raises(ValueError, match='at least one report'):
        tns_figure([])
    with pytest.raises(ValueError, match='number 1 does not'):
        tns_figure([make_report()[0], make_report(model=None)[0]])


def test_many_models_with_long_names_can_be_drawn(make_report):
    accuracies = [(f'a_model_with_a_rather_long_name_{i}_and_${i}', i) for i in range(9)]
    reports = make_models(make_report, accuracies)
    for figure in (runs_figure(reports), accuracy_figure(reports, 'accuracy/top1')):
        figure_to_image(figure, dpi=30)


def test_files(make_report, tmp_path):
    reports = make_models(make_report, [('a', 1)])
    files = save_comparison_figures(reports, tmp_path, metric='accuracy/top1')
    assert {file.name for file in files} == {
        f'{name}.{ending}'
        for name in ('tns', 'nsi_models', 'accuracy_tns')
        for ending in ('png', 'pdf')
    }
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.parametrize(
    ('value', 'error', 'expected'),
    [
        (1.23456, 0.0123, '1.235 ± 0.012'),
        (93.4, 0.1, '93.40 ± 0.10'),
        (123.4, 56.0, '123 ± 56'),
        (0.5, None, '0.5000'),
        (0.0, 0.0, '0.000 ± 0'),
    ],
)
def test_value_is_rounded_to_its_error(value, error, expected):
    assert with_error(value, error) == expected


def test_four_digits():
    values = (0.27734, 1.98, 91.7, 300.0, 999.96, 12345.6, None)
    expected = ['0.2773', '1.980', '91.70', '300.0', '1000', '12,346', '–']
    assert [four_digits(value) for value in values] == expected


def test_long_names_lose_what_they_share():
    names = ['resnet164_se_cifar10', 'resnet164_stepnet_cifar10']
    assert short_names(names, 12) == ['…se…', '…stepnet…']
    assert short_names(names, 25) == names
    assert short_names(['resnet', 'resnet_se_with_more'], 10) == ['resnet', 'resne…more']
    assert shorten('abcdefghij', 5) == 'ab…ij'
