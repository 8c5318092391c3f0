"""Tables of text, and numbers as they show them."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; NaN for a single value)."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard deviation`` of some runs, as a table shows it; a dash for no run."""
    if not values:
        return '-'
    mean, std = mean_and_std(values)
    return f'{mean:.{digits}f}' if math.isnan(std) else f'{mean:.{digits}f} ± {std:.{digits}f}'


@dataclass
class Table:
    """Rows of text that print as text, Markdown or CSV."""

    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def text(self) -> str:
        """Columns aligned by spaces."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        return '\n'.join(
            '  '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """A table as GitHub renders it."""
        lines = [self.header, ['---'] * len(self.header), *self.rows]
        return '\n'.join(f'| {" | ".join(line)} |' for line in lines)

    def csv(self) -> str:
        """Comma-separated values."""
        out = io.StringIO()
        csv.writer(out, lineterminator='\n').writerows([self.header, *self.rows])
        return out.getvalue().rstrip('\n')

    def write(self, path: Path) -> list[Path]:
        """Write ``path`` with the endings ``.txt``, ``.md`` and ``.csv``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        files = []
        for ending, content in (
            ('.txt', self.text()),
            ('.md', self.markdown()),
            ('.csv', self.csv()),
        ):
            files.append(path.with_suffix(ending))
            files[-1].write_text(content + '\n', encoding='utf-8')
        return files
