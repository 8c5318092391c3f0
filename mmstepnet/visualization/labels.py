"""Names and numbers as figures, tables and pages show them."""

import math


def metric_label(metric):
    """Return a metric's name, with its unit where the name gives it away."""
    # mmpretrain counts in per cent, mmdet in shares of one.
    in_percent = metric.split('/')[0] in ('accuracy', 'single-label', 'multi-label')
    return f'{metric} (%)' if in_percent else metric


def four_digits(value):
    """Return a number with four significant digits, trailing zeros too; None as a dash."""
    if value is None:
        return '–'
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:#.4g}'.rstrip('.')


def with_error(value, error):
    """Return ``value ± error``, rounded to two digits of the error; ``error`` may be None."""
    if error is None:
        return four_digits(value)
    if error <= 0:
        return f'{four_digits(value)} ± 0'
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f'{value:.{decimals}f} ± {error:.{decimals}f}'


def literal(text):
    """Return ``text``, a user's file name for example, so that matplotlib sees no formula in it."""
    return text.replace('$', r'\$')


def shorten(text, length):
    """Return ``text``, without its middle if it has more than ``length`` characters."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f'{text[: length - 1 - tail]}…{text[len(text) - tail :]}'


def short_names(names, length):
    """Return names of at most ``length`` characters that can still be told apart, if possible.

    If one is too long, all lose the words that all begin with and all end with.

    Args:
        names (Iterable[str]): Names of models.
        length (int): Characters allowed.

    Returns:
        list[str]: In the same order.
    """
    names = list(names)
    if max(map(len, names)) > length and len(set(names)) > 1:
        start = _common_words(names)
        end = _common_words([name[start:][::-1] for name in names])
        names = [
            '…' * (start > 0) + name[start : len(name) - end] + '…' * (end > 0) for name in names
        ]
    return [shorten(name, length) for name in names]


def _common_words(names):
    """Length of the beginning that all names share, up to where a word begins in all of them."""
    # The shortest name may be a beginning of all others.
    differ = (i for i, column in enumerate(zip(*names, strict=False)) if len(set(column)) > 1)
    prefix = names[0][: next(differ, min(map(len, names)))]
    return max(prefix.rfind(separator) + 1 for separator in '_-. /')
