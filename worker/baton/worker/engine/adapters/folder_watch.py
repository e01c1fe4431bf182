"""Reads a folder of adapters again and again, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.rpc.errors import ServiceError

_log = logging.getLogger(__name__)

_CONFIG_FILE = "adapter_config.json"
_INTERVAL_SECONDS = 0.5

Found = Mapping[str, tuple[str, bytes]]  # path and digest by name


class FolderWatch:
    """The sub-folders with adapters. `wake`: called after a change, on the thread."""

    def __init__(self, folder: Path, digest: Callable[[str], bytes], wake: Callable[[], object]) -> None:
        self._folder = folder
        self._digest = digest
        self._wake = wake
        self._known: dict[str, tuple[tuple[tuple[str, int, int], ...], bytes | None]] = {}  # stamps of files, digest
        self._new: Found | None = None
        self._last: Found = {}
        self._closing = threading.Event()
        self._look()  # so that a worker starts with what is there
        self._thread = threading.Thread(target=self._run, name="adapter folder", daemon=True)
        self._thread.start()

    def take(self) -> Found | None:
        """Returns the adapters if they have changed since the last call."""
        new, self._new = self._new, None
        return new

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_SECONDS):
            if self._look():
                self._wake()

    def _look(self) -> bool:
        """Reads the folder. Returns whether something has changed."""
        try:
            folders = sorted(one for one in self._folder.iterdir() if (one / _CONFIG_FILE).is_file())
        except OSError as error:
            _log.warning("the folder of adapters %s cannot be read: %s", self._folder, error.strerror)
            return False
        known, self._known = self._known, {}
        for folder in folders:
            try:
                stamps = tuple(
                    (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.iterdir())
                )
            except OSError:
                continue  # it is being written or removed
            before = known.get(folder.name)
            self._known[folder.name] = (
                before
                if before is not None and before[0] == stamps
                else (
                    stamps,
                    self._read(folder),
                )
            )
        found = {
            name: (str(self._folder / name), digest) for name, (_, digest) in self._known.items() if digest is not None
        }
        if found == self._last and self._new is None and known:
            return False
        self._last = self._new = found
        return True

    def _read(self, folder: Path) -> bytes | None:
        try:
            return self._digest(str(folder))
        except ServiceError as error:
            _log.warning("no adapter is served from %s: %s", folder, error.message)
            return None
