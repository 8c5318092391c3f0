"""One HTML page that shows several stiffness reports, complete in itself.

The page needs no network and no second file: style, script, figures and numbers are inside. It is
readable without JavaScript, which only sorts the tables.
"""

import base64
import io
import json
import re
from html import escape
from string import Template
from typing import NamedTuple

from .figures import styled
from .labels import four_digits


class Cell(NamedTuple):
    """What a table shows, and what it is sorted by (None: always last)."""

    text: str
    value: float | str | None


class Table(NamedTuple):
    """Headings, and rows of as many cells."""

    headings: list[str]
    rows: list[list[Cell]]


class Section(NamedTuple):
    """What the page shows of one report."""

    title: str
    report: dict
    figures: dict


CAPTIONS = {
    'tns': 'Total neural stiffness (TNS) of each model.',
    'nsi_models': 'Mean NSI along the recorded blocks, one panel a model; stages are shaded.',
    'accuracy_tns': 'Accuracy against TNS, one mark a model, with rank correlations over models.',
    'delta': 'Stiffness degree δ(M₁, M₂): the share of samples with at least one stiff block. '
    'The volume under it is TNS.',
    'p_hat': 'Proportion p̂(M₁, M₂): the share of stiff blocks.',
    'nsi': 'NSI along the recorded blocks: median and quartiles over samples.',
    'step_size': 'Step size along the recorded blocks: median and quartiles over samples.',
    'nsi_step_size': 'NSI against step size in the blocks of lowest, median and highest '
    'correlation, and the correlations of all blocks.',
}

NSI_FORMULA = {
    'attention': 'NSI = ‖f‖ / ‖x‖ (step: attention)',
    'unit': 'NSI = ‖f · dt‖ / ‖x‖ (step: unit)',
}


def render_page(title, notes, tables, figures, sections):
    """Return the page.

    Args:
        title (str): Its heading.
        notes (Sequence[str]): Sentences under the heading.
        tables (dict[str, Table]): Tables by caption, the across-model numbers.
        figures (dict[str, Figure]): Across-model figures by name, a key of ``CAPTIONS``.
        sections (Sequence[Section]): One for each report.

    Returns:
        str: An HTML document. Every text that was passed in is escaped.
    """
    links = ''.join(
        f'<li><a href="#report-{index}">{escape(section.title)}</a></li>'
        for index, section in enumerate(sections, 1)
    )
    return Template(_PAGE).substitute(
        title=escape(title),
        style=_STYLE,
        script=_SCRIPT,
        notes=''.join(f'<p>{escape(note)}</p>' for note in notes),
        tables=''.join(_table(caption, table) for caption, table in tables.items()),
        figures=_figures(figures, 'All models'),
        links=links,
        sections=''.join(_section(index, section) for index, section in enumerate(sections, 1)),
    )


def _section(index, section):
    report = section.report
    facts = {
        'Model': report['model'],
        'Data set': report['dataset'],
        'Samples': f'{report["num_samples"]:,}'
        + (f' ({report["num_omitted"]:,} left out)' if report['num_omitted'] else ''),
        'Measured as': NSI_FORMULA[report['step']],
        'Config': report['config'],
        'Checkpoint': report['checkpoint'],
        'Measured at': report['created'],
        'Versions': ', '.join(f'{name} {version}' for name, version in report['versions'].items()),
        **{name: _show(value) for name, value in report['metrics'].items()},
    }
    items = ''.join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in facts.items()
        if value
    )
    blocks = _block_table(report)
    content = base64.b64encode(json.dumps(report).encode()).decode()
    return f"""
<section id="report-{index}">
<h2>{escape(section.title)}</h2>
<dl>{items}</dl>
{_figures(section.figures, section.title)}
<details><summary>Numbers of the {len(blocks.rows)} blocks</summary>
{_table('Means over samples', blocks)}
</details>
<p class="screen"><a download="stiffness-{index}.json" href="data:application/json;base64,{content}"
>Save this report (JSON)</a></p>
</section>"""


def _block_table(report):
    columns = [report['stages'], report['names'], report['nsi_mean']]
    headings = ['Block', 'Stage', 'Name', 'Mean NSI']
    if report['dt_mean'] is not None:
        columns.append(report['dt_mean'])
        headings.append('Mean step size')
    rows = [
        [
            Cell(str(position), position),
            Cell(str(stage), stage),
            Cell(name, name),
            *(Cell(four_digits(mean), mean) for mean in means),
        ]
        for position, (stage, name, *means) in enumerate(zip(*columns, strict=True), 1)
    ]
    return Table(headings, rows)


def _table(caption, table):
    numeric = [
        all(not isinstance(row[column].value, str) for row in table.rows)
        for column in range(len(table.headings))
    ]
    head = ''.join(
        f'<th scope="col"{_number_class(is_number)}><button type="button">{escape(heading)}'
        '</button></th>'
        for heading, is_number in zip(table.headings, numeric, strict=True)
    )
    body = ''
    for row in table.rows:
        cells = ''
        for column, cell in enumerate(row):
            value = '' if cell.value is None else f' data-value="{escape(str(cell.value))}"'
            opening = 'th scope="row"' if column == 0 else 'td'
            text = re.sub('([_/])', r'\1<wbr>', escape(cell.text))
            cells += f'<{opening}{value}{_number_class(numeric[column])}>{text}</{opening[:2]}>'
        body += f'<tr>{cells}</tr>\n'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table><caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead>\n'
        f'<tbody>\n{body}</tbody></table></div>\n'
    )


def _number_class(is_number):
    return ' class="number"' if is_number else ''


def _figures(figures, subject):
    parts = []
    for name, figure in figures.items():
        caption = escape(CAPTIONS[name])
        source = base64.b64encode(_to_svg(figure)).decode()
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        parts.append(
            f'<figure><img alt="{escape(subject)}: {caption}" width="{width}" height="{height}" '
            f'src="data:image/svg+xml;base64,{source}"><figcaption>{caption}</figcaption></figure>'
        )
    return f'<div class="figures">{"".join(parts)}</div>'


@styled
def _to_svg(figure):
    file = io.BytesIO()
    figure.savefig(file, format='svg', dpi=200, metadata={'Date': None})
    return file.getvalue()


def _show(value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None if value is None else str(value)
    return four_digits(value)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
$notes
</header>
<section id="comparison">
$tables
$figures
</section>
<nav aria-label="Reports"><h2>Single reports</h2><ul>$links</ul></nav>
$sections
</main>
<script>$script</script>
</body>
</html>
"""

_STYLE = """
:root {
  --text: #1b1f24; --soft: #57606a; --page: #ffffff; --line: #d0d7de; --stripe: #f6f8fa;
  --link: #0b5cad;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6edf3; --soft: #9da7b1; --page: #0d1117; --line: #30363d; --stripe: #161b22;
    --link: #6cb6ff;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; color: var(--text); background: var(--page);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 76rem; margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1rem 0 0.5rem; }
h2 { font-size: 1.2rem; margin: 0 0 0.75rem; overflow-wrap: anywhere; }
header p { margin: 0.25rem 0; color: var(--soft); }
section, nav { margin-top: 2rem; padding-top: 1.5rem; border-top: 1px solid var(--line); }
a { color: var(--link); }
nav ul { columns: 18rem; margin: 0; padding-left: 1.2rem; }
nav li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: 0.4rem; }
caption span { display: block; max-width: 90vw; }
th, td { padding: 0.35rem 0.75rem; text-align: left; white-space: nowrap; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--page); }
tbody tr { border-top: 1px solid var(--line); }
tbody tr:nth-child(even) > * { background: var(--stripe); }
.number { text-align: right; }
thead th { padding: 0; vertical-align: bottom; white-space: normal; min-width: 5.5rem; }
thead button {
  font: inherit; font-weight: 600; color: inherit; background: none; border: 0; cursor: pointer;
  padding: 0.35rem 0.75rem; width: 100%; text-align: inherit;
}
thead button::after { content: "\\2195"; opacity: 0.35; margin-left: 0.3em; }
[aria-sort="ascending"] button::after { content: "\\2191"; opacity: 1; }
[aria-sort="descending"] button::after { content: "\\2193"; opacity: 1; }
:focus-visible { outline: 2px solid var(--link); outline-offset: -2px; }
.figures {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
  gap: 1rem; align-items: start;
}
figure { margin: 0; max-width: 28rem; }
img {
  display: block; width: 100%; height: auto; background: #fff; padding: 0.5rem;
  border: 1px solid var(--line); border-radius: 6px;
}
figcaption { color: var(--soft); font-size: 0.875rem; margin-top: 0.35rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr));
  gap: 0.5rem 1.5rem; margin: 0 0 1rem; }
dt { color: var(--soft); font-size: 0.875rem; }
dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 1rem 0; }
summary { cursor: pointer; padding: 0.35rem 0; }
@media screen and (min-width: 40rem) { wbr { display: none; } }
@media (max-width: 40rem) {
  /* The column that stays in sight must leave room for another. */
  tbody th { min-width: 8.5rem; max-width: 42vw; white-space: normal; overflow-wrap: anywhere; }
  th, td, thead button { padding-left: 0.5rem; padding-right: 0.5rem; }
}
@media print {
  :root { --text: #000; --soft: #444; --page: #fff; --line: #bbb; --stripe: #fff; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  nav, .screen, thead button::after { display: none; }
  .scroll { overflow: visible; }
  th, td { padding: 0.15rem 0.4rem; }
  thead th { min-width: 0; }
  thead button { padding: 0.15rem 0.4rem; }
  thead { display: table-header-group; }
  tbody th { position: static; }
  .figures { grid-template-columns: repeat(3, 1fr); gap: 0.5rem; }
  figure, tr, dl { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""

_SCRIPT = """
'use strict';
const order = new Intl.Collator(undefined, {numeric: true});
function compare(a, b, isNumber) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  return isNumber ? a - b : order.compare(a, b);
}
for (const table of document.querySelectorAll('table')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector('button').addEventListener('click', () => {
      const isNumber = head.classList.contains('number');
      // Names start at A, numbers with the largest.
      const first = isNumber ? 'descending' : 'ascending';
      const second = isNumber ? 'ascending' : 'descending';
      const direction = head.getAttribute('aria-sort') === first ? second : first;
      heads.forEach(other => other.removeAttribute('aria-sort'));
      head.setAttribute('aria-sort', direction);
      const rows = [...table.tBodies[0].rows];
      const key = row => row.cells[column].dataset.value;
      rows.sort((x, y) => {
        const a = key(x), b = key(y);
        const missing = a === undefined || b === undefined;
        return compare(a, b, isNumber) * (direction === 'descending' && !missing ? -1 : 1);
      });
      table.tBodies[0].append(...rows);
    });
  });
}
// Paper has no way to open what is folded.
addEventListener('beforeprint', () => {
  for (const part of document.querySelectorAll('details')) part.open = true;
});
"""
