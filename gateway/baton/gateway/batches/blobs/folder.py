"""Blobs as files of a folder, which all gateways see: one machine's disk, or a shared file system."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from baton.gateway.batches.blobs.store import BlobMissing
from baton.rpc.errors import InvalidRequest, Unavailable

_log = logging.getLogger(__name__)

_INCOMPLETE = ".incomplete-"


class FolderBlobs:
    """Implements BlobStore. Creates the folder. Raises InvalidRequest if it cannot be used."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            usable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise _unusable(folder, error.strerror or str(error)) from error
        if not usable:
            raise _unusable(folder, "it is not writable")
        self._remove_abandoned()

    def put(self, name: str, pieces: Iterable[bytes]) -> int:
        path = self.folder / name
        incomplete = path.with_name(f"{path.name}{_INCOMPLETE}{uuid.uuid4().hex}")
        size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _created(incomplete) as file:
                for piece in pieces:
                    size += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                incomplete.rename(path)  # while it is locked
        except OSError as error:
            raise _failed("write", error) from error
        finally:
            with contextlib.suppress(OSError):
                incomplete.unlink(missing_ok=True)
        return size

    def read(self, name: str, offset: int, length: int) -> bytes:
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), length, offset)
        except FileNotFoundError as error:
            raise BlobMissing(f"the stored bytes of {name} are missing") from error
        except OSError as error:
            raise _failed("read", error) from error

    def delete(self, name: str) -> None:
        path = self.folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed("delete", error) from error
        # The folder of a batch's parts ends with the last of them.
        if path.parent.parent != self.folder:
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def names(self, prefix: str) -> list[str]:
        folder = self.folder / prefix
        found = (path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else ()
        return sorted(path.relative_to(self.folder).as_posix() for path in found)

    def _remove_abandoned(self) -> None:
        """Removes files that killed gateways left incomplete. Nobody holds their locks."""
        # os.walk passes over folders that others delete meanwhile.
        found = (Path(at, name) for at, _, names in os.walk(self.folder) for name in names if _INCOMPLETE in name)
        for incomplete in found:
            with contextlib.suppress(OSError), incomplete.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                incomplete.unlink(missing_ok=True)
                _log.info("removed %s, which a gateway that was killed had begun", incomplete)


def _created(path: Path) -> BinaryIO:
    """Returns a new file, locked until it is closed."""
    while True:
        file = path.open("wb")
        with contextlib.suppress(OSError):  # without locks it cannot be known which files are abandoned
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # removed by a gateway that started before it was locked


def _unusable(folder: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"batch_store: cannot use the folder {folder!r}: {why}; give a writable folder", field="batch_store"
    )


def _failed(what: str, error: OSError) -> Unavailable:
    reason = error.strerror or str(error)
    return Unavailable(f"cannot {what} in the folder of batch_store: {reason}; retry later", retry_after_ms=1000)
