"""Formats figures for a terminal. Unknown values are a dash. Pure."""

from __future__ import annotations

import re

NOTHING = "-"
_PREFIXES = ("", "k", "M", "G", "T", "P")


def printable(text: str) -> str:
    """Removes control characters, because identifiers come from clients."""
    return "".join(char if char.isprintable() else "?" for char in text)


def natural(text: str) -> str:
    """Returns a natural sort key: worker-2 before worker-10."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(20), text)


def count(value: float | None) -> str:
    """Formats a whole number with separators."""
    return NOTHING if value is None else f"{round(value):,}"


def out_of(part: float | None, whole: float) -> str:
    """Formats a part of a whole: 2 of 8."""
    return NOTHING if part is None else f"{count(part)} of {count(whole)}"


def short(value: float | None) -> str:
    """Formats three digits: 1.24 M."""
    if value is None:
        return NOTHING
    at = 0
    while abs(value) >= 999.5 and at < len(_PREFIXES) - 1:
        value /= 1000
        at += 1
    digits = 0 if value >= 99.5 or (value == int(value) and at == 0) else 1 if value >= 9.95 else 2
    return f"{value:.{digits}f} {_PREFIXES[at]}".rstrip()


def rate(value: float | None) -> str:
    """Formats a rate per second."""
    return NOTHING if value is None else f"{short(value)}/s"


def size(value: float | None) -> str:
    """Formats a number of bytes."""
    if value is None:
        return NOTHING
    text = short(value)
    return f"{text}B" if " " in text else f"{text} B"


def bandwidth(value: float | None) -> str:
    """Formats bytes per second."""
    return NOTHING if value is None else f"{size(value)}/s"


def percent(part: float | None) -> str:
    """Formats a share as a percentage."""
    if part is None:
        return NOTHING
    hundredth = 100 * part
    return f"{hundredth:.1f} %" if 0 < hundredth < 9.95 else f"{hundredth:.0f} %"


def duration(seconds: float | None) -> str:
    """Formats seconds in a suitable unit."""
    if seconds is None:
        return NOTHING
    if seconds < 0.00995:
        return f"{seconds * 1000:.2f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.0995 else 0}f} ms"
    if seconds < 99.5:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def age(seconds: float) -> str:
    """Formats a time in the past."""
    if seconds < 0.95:
        return "now"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3570 else f"{seconds / 3600:.0f} h"


def bar(part: float | None, width: int) -> str:
    """Draws a share as a bar."""
    filled = round(max(0.0, min(1.0, part or 0.0)) * width)
    return "#" * filled + "." * (width - filled)


def span(start: float, length: float, total: float, width: int) -> str:
    """Draws a part of a line of `width` that stands for `total`; never empty."""
    if total <= 0:
        return " " * width
    first = min(width - 1, int(start / total * width))
    last = min(width, max(first + 1, round((start + length) / total * width)))
    return " " * first + "#" * (last - first) + " " * (width - last)
