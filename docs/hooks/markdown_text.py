"""Text for Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED_NOTE = "This page is generated from the code by `make docs`.\n"


def cell(text: str) -> str:
    """Returns a text for a cell of a table: one line, without markup of its own."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    """Returns a text as code in a cell of a table; nothing for an empty one."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of finished cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
