"""`baton keys` on a file. Keeps its comments and format, and replaces it atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from baton.gateway.access.keys.file import parse_keys
from baton.gateway.access.keys.records import Document, KeyEntry, TenantEntry, directory_of, document_of
from baton.rpc.errors import InvalidRequest, Unavailable

_PRIVATE = 0o600


class FileKeys:
    """Implements KeyKeeper."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[dict[str, KeyEntry], dict[str, TenantEntry]]:
        document = self._document(self._text())
        return {entry.id: entry for entry in document.keys}, document.tenants

    def add(self, entry: KeyEntry) -> None:
        write = _json_with if self._is_json else _toml_with
        with self._locked():
            text = self._text()
            wanted = self._document(text)
            wanted.keys.append(entry)
            self._write(write(text, entry), wanted)

    def revoke(self, entry: KeyEntry) -> None:
        write: Callable[[str, KeyEntry], str] = _json_with if self._is_json else _toml_revoking
        revoked = replace(entry, revoked=True)
        with self._locked():
            text = self._text()
            wanted = self._document(text)
            wanted.keys[:] = [revoked if one.id == entry.id else one for one in wanted.keys]
            self._write(write(text, revoked), wanted)

    @property
    def _is_json(self) -> bool:
        return self._path.suffix == ".json"

    def _text(self) -> str:
        """Returns the file's text, empty if there is no file yet."""
        try:
            return self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise Unavailable(f"{self._path} cannot be read: {error}") from error

    def _document(self, text: str) -> Document:
        try:
            document = document_of(parse_keys(text, self._path))
            directory_of(document)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._path}: {error.message}") from error
        return document

    def _write(self, text: str, wanted: Document) -> None:
        """Replaces the file atomically. Checks first that the new text parses to exactly the wanted keys."""
        with contextlib.suppress(InvalidRequest):
            if self._document(text) == wanted:
                self._replace(text)
                return
        raise InvalidRequest(f"{self._path} is written in a way that this cannot be put into; edit it by hand")

    def _replace(self, text: str) -> None:
        try:
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, self._path.stat().st_mode & 0o777 if self._path.exists() else _PRIVATE)
            os.replace(name, self._path)
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be written: {error}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks out other writers. Locks the folder, because the file itself is replaced."""
        try:
            folder = os.open(self._path.parent, os.O_RDONLY)
        except OSError as error:
            raise Unavailable(f"{self._path.parent} cannot be opened: {error}") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _json_with(text: str, entry: KeyEntry) -> str:
    content = json.loads(text or "{}")
    keys = [one for one in content.get("keys", []) if one["id"] != entry.id]
    place = next((index for index, one in enumerate(content.get("keys", [])) if one["id"] == entry.id), len(keys))
    keys.insert(place, msgspec.to_builtins(entry))
    return json.dumps({**content, "keys": keys}, indent=2) + "\n"


def _toml_with(text: str, entry: KeyEntry) -> str:
    lines = ["[[keys]]", *(f"{name} = {_toml(value)}" for name, value in msgspec.to_builtins(entry).items())]
    return "\n".join([*([text.rstrip("\n"), ""] if text.strip() else []), *lines]) + "\n"


def _toml_revoking(text: str, entry: KeyEntry) -> str:
    """Adds a line after the key's id."""
    return re.sub(rf"(?m)^(\s*id\s*=\s*[\"']{entry.id}[\"'].*)$", r"\1\nrevoked = true", text, count=1)


def _toml(value: object) -> str:
    """Formats a value: strings and lists of strings look alike in both formats; times are written as strings."""
    return json.dumps(value)
