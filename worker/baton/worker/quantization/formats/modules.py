"""The modules that a quantization_config names: by name, by the end of one, by a pattern or by a regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache

_REGEX = "re:"
_WRAPPERS = ("model", "language_model")
# Where checkpoints with a vision tower keep the text part.
_SPELLINGS = (("", ""), ("", "language_model."), ("model.", "model.language_model."))


class Modules:
    """A list of modules."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises ValueError for a broken regular expression."""
        self._regexes = tuple(_compiled(one[len(_REGEX) :]) for one in patterns if one.startswith(_REGEX))
        plain = [one for one in patterns if not one.startswith(_REGEX)]
        self._globs = tuple(one for one in plain if "*" in one)
        self._runs = tuple(_segments(one) for one in plain if "*" not in one and one)

    def has(self, name: str) -> bool:
        """Returns whether the list names a module, a module around it, or the end of its name."""
        return (
            any(regex.match(one) for regex in self._regexes for one in _spellings(name))
            or any(fnmatchcase(one, glob) for glob in self._globs for one in _spellings(name))
            or any(_contains(_segments(name), run) for run in self._runs)
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


@cache
def _segments(name: str) -> tuple[str, ...]:
    """Returns the name's parts, without those of the modules around all layers."""
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in _WRAPPERS:
        segments = segments[1:]
    return tuple(segments)


def _spellings(name: str) -> list[str]:
    return [theirs + name[len(ours) :] for ours, theirs in _SPELLINGS if name.startswith(ours)]


def _contains(segments: Sequence[str], run: Sequence[str]) -> bool:
    return any(segments[start : start + len(run)] == run for start in range(len(segments) - len(run) + 1))
