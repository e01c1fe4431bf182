"""The path that a client likely means by one that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches

_MAX_LENGTH = 200  # longer paths are not compared: that takes time that grows with the square of the length
_SIMILARITY = 0.8
_ROOTS = ("/v1/v1", "/openai/v1", "/api/v1", "/v1", "")  # that base URLs of clients end in


def likely_path(path: str, exists: Callable[[str], bool], paths: Collection[str]) -> str:
    """Returns the existing path nearest to `path`; empty where none is near. `paths` are those without parameters."""
    if len(path) > _MAX_LENGTH:
        return ""
    for candidate in _respelled(path):
        if candidate != path and exists(candidate):
            return candidate
    return next(iter(get_close_matches(path, paths, 1, _SIMILARITY)), "")


def _respelled(path: str) -> Iterator[str]:
    """Returns the path without doubled or trailing slashes, then under each root that there is."""
    plain = re.sub(r"/{2,}", "/", f"/{path}").rstrip("/")
    yield plain
    for root in _ROOTS:
        rest = plain.removeprefix(root)
        if rest != plain or not root:
            yield f"/v1{rest}"
            yield rest
            yield rest.lower()
            yield f"/v1{rest}".lower()
