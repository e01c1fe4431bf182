"""The response header that lists ignored fields of the request and skipped tools."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADER = "x-baton-ignored"

_MAX_NAMES = 16
_MAX_CHARS = 64  # per name
_HIDDEN = re.compile(r"[^!-+\--~]")  # everything except visible ASCII, and the comma that separates names


def header_of(names: Sequence[str]) -> str:
    """Returns the header's value: names separated by commas, limited and without invalid characters."""
    shown = ", ".join(map(_shown, names[:_MAX_NAMES]))
    more = len(names) - _MAX_NAMES
    return f"{shown}, +{more} more" if more > 0 else shown


def ignored_tool(index: int, kind: str) -> str:
    """Returns the name of a skipped tool."""
    return f"tools[{index}] ({_plain(kind)})"


def _shown(name: str) -> str:
    place, space, kind = name.partition(" (")
    return f"{_plain(place)}{space}{_plain(kind, _MAX_CHARS + 1)}"


def _plain(text: str, most: int = _MAX_CHARS) -> str:
    """Replaces characters of client text that a header must not contain."""
    return _HIDDEN.sub("?", text[:most])
