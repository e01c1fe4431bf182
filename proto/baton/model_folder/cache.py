"""The folder of files that are made of models in other formats. A folder in it is made once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from baton.rpc.errors import InvalidRequest

_log = logging.getLogger(__name__)

# A new version makes other files of the same sources.
_VERSION = 2
_KEY_BYTES = 12


def made_folder(sources: Iterable[Path], name: str, make: Callable[[Path], None], kind: str) -> Path:
    """Returns a folder called `name`, whose files `make` has written, for these source files as they are now.

    `kind` distinguishes folders of the same sources. Several processes may call this at once.
    """
    root = _root(os.environ)
    final = root / _key(sources, kind) / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=final.parent))
    try:
        make(draft)
        draft.chmod(0o755)
        draft.rename(final)
    except OSError as error:
        if not final.is_dir():  # another process may have been faster
            raise InvalidRequest(
                f"{final} cannot be written: {error.strerror or error}; XDG_CACHE_HOME names another folder",
                field="model",
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes one file of a folder that is being made."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _root(environ: Mapping[str, str]) -> Path:
    """Returns the cache by the XDG specification; a temporary folder where it cannot be written."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "/nonexistent") / ".cache"
    path = Path(base) / "baton" / "models"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK | os.X_OK):
            return path
        reason = "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    temporary = Path(tempfile.mkdtemp(prefix="baton-models-"))
    _log.warning("files made of the model are kept in %s only: %s: %s", temporary, path, reason)
    return temporary


def _key(sources: Iterable[Path], kind: str) -> str:
    hasher = hashlib.blake2b(f"{_VERSION}:{kind}".encode(), digest_size=_KEY_BYTES)
    for path in sorted(source.resolve() for source in sources):
        status = path.stat()
        hasher.update(f"{path}:{status.st_size}:{status.st_mtime_ns}".encode())
    return hasher.hexdigest()
