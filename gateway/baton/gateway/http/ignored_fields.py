"""The header that lists what an answer left out of account: fields of the request, and tools that are not served."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADER = "x-baton-ignored"

_MAX_NAMES = 16
_MAX_CHARS = 64  # of one name
_HIDDEN = re.compile(r"[^!-+\--~]")  # all but visible ASCII, and the comma that separates names


def header_of(names: Sequence[str]) -> str:
    """Returns the header's value: names separated by commas, bounded, without what a header must not have."""
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
    """Replaces what clients may have written into a name."""
    return _HIDDEN.sub("?", text[:most])
