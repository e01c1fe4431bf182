"""Suggests an existing path for an unknown one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches

_MAX_LENGTH = 200  # longer paths are not compared, which takes time quadratic in the length
_SIMILARITY = 0.8
_ROOTS = ("/v1/v1", "/openai/v1", "/api/v1", "/v1", "")  # common ends of clients' base URLs


def likely_path(path: str, exists: Callable[[str], bool], paths: Collection[str]) -> str:
    """Returns the existing path closest to `path`, or an empty text. `paths` are those without parameters."""
    if len(path) > _MAX_LENGTH:
        return ""
    for candidate in _respelled(path):
        if candidate != path and exists(candidate):
            return candidate
    return next(iter(get_close_matches(path, paths, 1, _SIMILARITY)), "")


def _respelled(path: str) -> Iterator[str]:
    """Yields the path without doubled or trailing slashes, then under each known root."""
    plain = re.sub(r"/{2,}", "/", f"/{path}").rstrip("/")
    yield plain
    for root in _ROOTS:
        rest = plain.removeprefix(root)
        if rest != plain or not root:
            yield f"/v1{rest}"
            yield rest
            yield rest.lower()
            yield f"/v1{rest}".lower()
