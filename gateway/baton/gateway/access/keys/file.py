"""Keys and tenants in a TOML or JSON file, read again when it changes. An invalid file leaves the previous state."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from baton.gateway.access.keys.directory import Directory
from baton.gateway.access.keys.records import directory_of, document_of
from baton.rpc.errors import InvalidRequest

Signature = tuple[int, int, int]


class KeyFile:
    """Implements KeySource."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._path = Path(path)
        self._signature: Signature | None = None

    async def read_if_changed(self) -> Directory | None:
        """Returns the file's content, or None if it has not changed. Raises InvalidRequest for an invalid file."""
        signature = self._stat()
        if signature == self._signature:
            return None
        # An invalid file is not read again until it changes.
        self._signature = signature
        return read_key_file(self._path)

    async def close(self) -> None:
        """Does nothing: no file stays open."""

    def _stat(self) -> Signature:
        try:
            found = os.stat(self._path)
        except OSError as error:
            self._signature = None
            unreadable = _unreadable(self._path, error)
            raise InvalidRequest(f"api_keys={self._path}: {unreadable.message}", field="api_keys") from error
        return found.st_ino, found.st_mtime_ns, found.st_size


def read_key_file(path: Path) -> Directory:
    """Reads and validates a key file. Raises InvalidRequest that names the file and the place."""
    try:
        return directory_of(document_of(parse_key_file(path)))
    except InvalidRequest as error:
        raise InvalidRequest(f"api_keys={path}: {error.message}", field="api_keys") from error


def parse_key_file(path: Path) -> dict[str, Any]:
    """Parses a key file: JSON if its name ends in .json, else TOML. Raises InvalidRequest."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("not UTF-8", field="api_keys") from error
    return parse_keys(text, path)


def parse_keys(text: str, path: Path) -> dict[str, Any]:
    """Parses the text of a key file. Raises InvalidRequest."""
    try:
        content = json.loads(text or "{}") if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InvalidRequest(f"invalid {kind}: {error}", field="api_keys") from error
    if not isinstance(content, dict):
        raise InvalidRequest("must be an object with keys and tenants", field="api_keys")
    return content


def _unreadable(path: Path, error: OSError) -> InvalidRequest:
    reason = f"cannot read the file ({error.strerror}); `baton keys create --api-keys {path}` creates one"
    return InvalidRequest(reason, field="api_keys")
