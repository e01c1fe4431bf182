"""A communicator of two ranks, the sender 0 and the receiver 1, that never blocks its caller for long.

From NCCL's user guide: calls on a non-blocking communicator return ncclInProgress and go on in the background;
ncclCommGetAsyncError says when they are done, and ncclCommAbort ends kernels that wait for a peer. Between two aborts
or errors every send must meet its receive in the same order on both sides.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from nccl.bindings import nccl
from nccl.core import NCCLConfig, get_unique_id

from baton.rpc.errors import DeadlineExceeded, Unavailable

ID_BYTES = 128
CONNECT_SECONDS = 10.0
_CALL_SECONDS = 5.0
_SPIN_SECONDS = 200e-6
_NAP_SECONDS = 100e-6
_UINT8 = 1  # ncclUint8
_IN_PROGRESS = int(nccl.Result.InProgress)


def new_id() -> bytes:
    """ID_BYTES bytes that both ranks need."""
    return bytes(get_unique_id())


class Pair:
    """One rank of the two. Calls belong to one thread, but for `abort`."""

    def __init__(self, unique_id: bytes, rank: int) -> None:
        self._peer = 1 - rank
        self._lock = threading.Lock()  # of the handle, against abort
        config = NCCLConfig(blocking=False)._to_lowpp()
        self._comm: int = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(unique_id), config.ptr)

    def wait_ready(self, seconds: float) -> None:
        """Until both ranks have met. Raises DeadlineExceeded, or Unavailable where NCCL says why not."""
        self._settle(seconds)

    def send(self, address: int, num_bytes: int, stream: int) -> None:
        """Queues the sending of device memory on the stream."""
        self._call(lambda comm: nccl.send(address, num_bytes, _UINT8, self._peer, comm, stream))
        self.settle()

    def receive(self, address: int, num_bytes: int, stream: int) -> None:
        """Begins to queue the receiving into device memory on the stream: it is there after `settle`."""
        self._call(lambda comm: nccl.recv(address, num_bytes, _UINT8, self._peer, comm, stream))

    def settle(self) -> None:
        """What was begun is queued. Raises DeadlineExceeded or Unavailable."""
        self._settle(_CALL_SECONDS)

    def abort(self) -> None:
        """Ends what waits, and the communicator. From any thread. Idempotent."""
        with self._lock:
            comm, self._comm = self._comm, 0
        if comm:
            nccl.comm_abort(comm)

    @property
    def aborted(self) -> bool:
        """No call works any more."""
        return self._comm == 0

    def _call(self, call: Callable[[int], object]) -> None:
        """One at a time: what was begun before comes to its end first."""
        self.settle()
        with self._lock:
            if not self._comm:
                raise Unavailable("the NCCL communicator was aborted")
            try:
                call(self._comm)
            except nccl.NCCLError as error:
                raise Unavailable(f"NCCL: {error}") from error

    def _settle(self, seconds: float) -> None:
        now = time.monotonic()
        spun, ends = now + _SPIN_SECONDS, now + seconds
        while (status := self._status()) == _IN_PROGRESS:
            now = time.monotonic()
            if now >= ends:
                raise DeadlineExceeded(f"NCCL made no progress in {seconds} s")
            if now < spun:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
        if status != 0:
            raise Unavailable(f"NCCL: {nccl.Result(status).name}")

    def _status(self) -> int:
        with self._lock:
            if not self._comm:
                raise Unavailable("the NCCL communicator was aborted")
            return int(nccl.comm_get_async_error(self._comm))
