"""The names that clients call models by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from baton.rpc.errors import InvalidRequest

# A file name's end that is not part of the model's name.
_GGUF_END = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")


def default_name(model: str) -> str:
    """Returns the name of a model that is given none: of its folder, of its hub id's end, or of its GGUF file."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve().name
    return _GGUF_END.sub("", re.split("[/:]", model.rstrip("/"))[-1])


def check_names(names: Sequence[str], field: str = "served_model_name") -> None:
    """Raises InvalidRequest for a duplicate name."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(f"{field}: {name!r} is there twice; give each name once", field=field)


def is_allowed(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether a shell pattern matches an adapter's name. `*` matches slashes; no pattern matches `..`, `.` or
    nothing between them, which would lead elsewhere where names are paths."""
    if any(part in ("", ".", "..") for part in name.split("/")):
        return False
    return any(fnmatchcase(name, pattern) for pattern in patterns)
