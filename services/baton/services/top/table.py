"""A table as lines of text that fit a width, without the rightmost columns if they do not fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_GAP = "  "
_MOST = 28  # characters of a cell, except in the last column


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: its head, the text of a row, and its sort key."""

    head: str
    say: Callable[[T], str]
    key: Callable[[T], float | str]
    is_number: bool = True


def render(columns: Sequence[Column[T]], rows: Sequence[T], width: int) -> list[str]:
    """Returns the head and one line per row, each at most `width` long."""
    cells = [[cut(column.say(row), _MOST) for column in columns] for row in rows]
    heads = [column.head for column in columns]
    widths = [max(len(line[at]) for line in (heads, *cells)) for at in range(len(columns))]
    shown = 1
    while shown < len(columns) and sum(widths[: shown + 1]) + len(_GAP) * shown <= width:
        shown += 1
    lines = []
    for line in (heads, *cells):
        aligned = [
            cell.rjust(size) if column.is_number else cell.ljust(size)
            for cell, size, column in zip(line[:shown], widths, columns, strict=False)
        ]
        lines.append(_GAP.join(aligned)[:width].rstrip())
    return lines


def cut(text: str, most: int) -> str:
    """Shortens a text to its end, because names differ there."""
    return text if len(text) <= most else f"~{text[1 - most :]}"
