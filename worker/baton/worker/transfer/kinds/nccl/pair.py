"""A communicator of two ranks: the sender is rank 0, the receiver rank 1.

From NCCL's user guide: calls on a non-blocking communicator return ncclInProgress and continue in the background, each
on a thread of its own; ncclCommGetAsyncError reports when they are done. The two ranks therefore meet in a non-blocking
communicator, whose set-up can be aborted. Then they split a blocking one off, whose calls queue a kernel and return:
they take 0.08 ms instead of 0.23. ncclCommAbort ends kernels that wait for a peer. Between two aborts or errors, sends
and receives must be in the same order on both sides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nccl.bindings import nccl
from nccl.core import NCCLConfig, get_unique_id

from baton.rpc.errors import DeadlineExceeded, Unavailable, Unsupported

ID_BYTES = 128
CONNECT_SECONDS = 10.0
_CALL_SECONDS = 5.0  # longer than any call takes that does not hang
_NAP_SECONDS = 1e-3
_UINT8 = 1  # ncclUint8
_IN_PROGRESS = int(nccl.Result.InProgress)


def new_id() -> bytes:
    """Returns ID_BYTES bytes that both ranks need."""
    return bytes(get_unique_id())


def load_kernels() -> None:
    """Loads NCCL's kernels. With the first communicator it would delay what others launch on the device.

    Raises Unsupported if NCCL cannot be used on this machine.
    """
    try:
        config = NCCLConfig(blocking=True)._to_lowpp()
        nccl.comm_destroy(nccl.comm_init_rank_scalable(1, 0, 1, bytearray(new_id()), config.ptr))
    except Exception as error:  # of the library, or of the code that searches for it
        raise Unsupported(f"NCCL: {type(error).__name__}: {error}") from error


class Pair:
    """One of the two ranks. One thread at a time calls it; `abort` may come from any."""

    def __init__(self, unique_id: bytes | None, rank: int, ended: Callable[[], None] = lambda: None) -> None:
        """Starts to look for the other rank, which needs the same id; None: a new one.

        `ended` is called on a thread of the pair when all its resources are freed.
        """
        self.unique_id = new_id() if unique_id is None else unique_id
        self._rank = rank
        self._on_end = ended
        self._lock = threading.Lock()  # guards the handles, and calls against `abort`
        config = NCCLConfig(blocking=False)._to_lowpp()
        self._meeting = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(self.unique_id), config.ptr)
        self._child: nccl.Comm | None = None  # NCCL fills in the handle when it is ready
        self._comm: nccl.Comm | None = None  # the same, once it is ready
        self._aborted = False
        self._lock_of_end = threading.Lock()  # guards _leaving
        self._leaving: threading.Thread | None = None  # ends the first communicator

    def meet(self, address: int, stream: int, seconds: float) -> None:
        """Waits until both ranks have met. Queues the transfer of the first byte, which sets up the connection.

        Raises DeadlineExceeded, or Unavailable with NCCL's reason.
        """
        deadline = threading.Timer(seconds, self.abort)
        deadline.daemon = True
        deadline.start()
        try:
            self._split()
            comm = self._comm
            if comm is not None:
                self._move(comm, address, 1, stream)  # may wait for the other rank; `abort` ends that
        except nccl.NCCLError as error:
            raise Unavailable(f"NCCL: {error}") from error
        finally:
            deadline.cancel()
        if self._aborted:
            raise DeadlineExceeded(f"the other end did not join the NCCL communicator in {seconds:g} s")

    def leave_meeting(self, seconds: float) -> None:
        """Ends the first communicator: call after the first byte has moved, and before the next.

        It frees memory, which waits for all work of the device and blocks every other CUDA call. If it ran while a
        kernel waits for a lost peer, the process would hang. Raises DeadlineExceeded.
        """
        with self._lock:
            meeting, self._meeting = self._meeting, None
            if meeting is not None:
                self._leaving = _in_background(lambda: nccl.comm_abort(meeting))
        if self._leaving is not None:
            self._leaving.join(seconds)
            if self._leaving.is_alive():
                raise DeadlineExceeded(f"the first NCCL communicator did not end in {seconds:g} s")

    def move(self, address: int, num_bytes: int, stream: int) -> None:
        """Queues a send from device memory on the stream, or a receive into it. Raises Unavailable."""
        with self._lock:
            if self._comm is None or self._aborted:
                raise Unavailable("the NCCL communicator was aborted")
            try:
                self._move(self._comm, address, num_bytes, stream)
                status = int(nccl.comm_get_async_error(self._comm))
            except nccl.NCCLError as error:
                raise Unavailable(f"NCCL: {error}") from error
        if status:
            raise Unavailable(f"NCCL: {nccl.Result(status).name}")

    def abort(self) -> None:
        """Makes waiting kernels end soon, and then the communicator, in the background. From any thread. Idempotent.

        NCCL frees memory at its end, which waits for all work of the device, kernels of other communicators included.
        """
        with self._lock_of_end:
            begun, self._aborted = self._aborted, True
        if not begun:
            _in_background(self._end)

    def _end(self) -> None:
        # An abort during a call that waits in its launch destroys the process's CUDA context (NCCL 2.28.9).
        locked = self._lock.acquire(timeout=_CALL_SECONDS)
        try:
            # A communicator whose kernel may wait comes first: the end of another would wait for it. The end of the
            # first communicator also ends a split that is in progress.
            order = (self._meeting, self._child) if self._comm is None else (self._comm, self._meeting)
            self._comm = self._child = self._meeting = None
        finally:
            if locked:
                self._lock.release()
        try:
            for comm in order:
                if comm is not None:
                    nccl.comm_abort(comm)
            if self._leaving is not None:
                self._leaving.join()
        finally:
            self._on_end()

    def _split(self) -> None:
        """Splits the communicator off. Waits for the other rank twice."""
        self._settle()
        with self._lock:
            if self._aborted:
                return
            config = NCCLConfig(blocking=True)._to_lowpp()
            self._child = nccl.comm_split(self._meeting, 0, self._rank, config.ptr)
        self._settle()
        with self._lock:
            if not self._aborted:
                self._comm = self._child

    def _move(self, comm: nccl.Comm, address: int, num_bytes: int, stream: int) -> None:
        call = nccl.send if self._rank == 0 else nccl.recv
        call(address, num_bytes, _UINT8, 1 - self._rank, comm, stream)

    def _settle(self) -> None:
        while (status := self._status()) == _IN_PROGRESS:
            time.sleep(_NAP_SECONDS)
        if status:
            raise Unavailable(f"NCCL: {nccl.Result(status).name}")

    def _status(self) -> int:
        with self._lock:
            return 0 if self._meeting is None else int(nccl.comm_get_async_error(self._meeting))


def _in_background(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, name="nccl-end", daemon=True)
    thread.start()
    return thread
