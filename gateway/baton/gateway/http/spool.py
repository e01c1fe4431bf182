"""Bodies that are received into a file instead of memory. Writes on a thread, and slows the client down to it."""

from __future__ import annotations

import asyncio
import io
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from baton.rpc.errors import Unavailable

_MAX_WAITING_BYTES = 4 << 20  # received and not yet written
_threads = ThreadPoolExecutor(2, "spool")


class Spool:
    """The body of one request in a file without a name, which ends with `close` or with the process."""

    def __init__(self, max_bytes: int, on_drained: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self._file: IO[bytes] | None = None  # made on the thread
        self._on_drained = on_drained
        self._waiting: list[bytes] = []
        self._num_waiting = 0
        self._writing: asyncio.Future[None] | None = None
        self._problem: OSError | None = None
        self._closed = False
        self._in_use = threading.Lock()  # the file, by the thread that writes

    @property
    def full(self) -> bool:
        """Returns whether the client must wait for the disk."""
        return self._num_waiting > _MAX_WAITING_BYTES

    def write(self, data: bytes) -> None:
        """Adds data to the file, soon."""
        self._waiting.append(data)
        self._num_waiting += len(data)
        if self._writing is None:
            self._write_more()

    async def complete(self) -> IO[bytes]:
        """Waits until everything is written. Returns the file. Raises Unavailable if the disk refused it."""
        while self._writing is not None:
            await asyncio.wait((self._writing,))
            await asyncio.sleep(0)
        if self._problem is not None:
            reason = self._problem.strerror or str(self._problem)
            raise Unavailable(f"cannot store the upload: {reason}; retry later", retry_after_ms=5000)
        return self._file or io.BytesIO()

    def close(self) -> None:
        """Drops the file. Idempotent."""
        self._closed = True
        self._waiting, self._num_waiting = [], 0
        self._close_unused()

    def _write_more(self) -> None:
        pieces, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(_threads, self._write, pieces)
        self._writing.add_done_callback(lambda done: self._written(sum(map(len, pieces))))

    def _write(self, pieces: list[bytes]) -> None:
        try:
            with self._in_use:
                if not self._closed:
                    self._append(pieces)
        except OSError as error:
            self._problem = error
        if self._closed:
            self._close_unused()

    def _append(self, pieces: list[bytes]) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[self._file.write(left) :]

    def _written(self, num_bytes: int) -> None:
        self._writing = None
        if self._closed:
            return
        self._num_waiting -= num_bytes
        if self._waiting and self._problem is None:
            self._write_more()
        elif self._problem is not None:
            self._waiting, self._num_waiting = [], 0
        self._on_drained()

    def _close_unused(self) -> None:
        """Closes the file, unless the thread writes: then that closes it afterwards."""
        if self._in_use.acquire(blocking=False):
            try:
                if self._file is not None:
                    self._file.close()
            finally:
                self._in_use.release()
