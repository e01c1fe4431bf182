"""A communicator of two ranks, the sender 0 and the receiver 1.

From NCCL's user guide: calls on a non-blocking communicator return ncclInProgress and go on in the background, on a
thread that each of them starts; ncclCommGetAsyncError says when they are done. So the two meet by such a one, which can
be given up, and then split a blocking one off it, whose calls queue a kernel and return: 0.08 ms where the other takes
0.23. ncclCommAbort ends kernels that wait for a peer. Between two aborts or errors every send must meet its receive in
the same order on both sides.
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
_CALL_SECONDS = 5.0  # no call takes as long, but for one that hangs
_NAP_SECONDS = 1e-3
_UINT8 = 1  # ncclUint8
_IN_PROGRESS = int(nccl.Result.InProgress)


def new_id() -> bytes:
    """ID_BYTES bytes that both ranks need."""
    return bytes(get_unique_id())


def load_kernels() -> None:
    """Now, not with the first communicator: it takes long, and holds up what others launch on the device meanwhile.

    Raises Unsupported where NCCL cannot be used on this machine.
    """
    try:
        config = NCCLConfig(blocking=True)._to_lowpp()
        nccl.comm_destroy(nccl.comm_init_rank_scalable(1, 0, 1, bytearray(new_id()), config.ptr))
    except Exception as error:  # the library's own, and those of whatever looks for it
        raise Unsupported(f"NCCL: {type(error).__name__}: {error}") from error


class Pair:
    """One rank of the two. Called by one thread at a time, but for `abort`."""

    def __init__(self, unique_id: bytes | None, rank: int, ended: Callable[[], None] = lambda: None) -> None:
        """Begins to look for the other, which needs the same id; None: a new one.

        `ended` is called, by a thread of the pair's own, when nothing is left of it.
        """
        self.unique_id = new_id() if unique_id is None else unique_id
        self._rank = rank
        self._tell_end = ended
        self._lock = threading.Lock()  # of the handles, and of calls against abort
        config = NCCLConfig(blocking=False)._to_lowpp()
        self._meeting = nccl.comm_init_rank_scalable(2, rank, 1, bytearray(self.unique_id), config.ptr)
        self._child: nccl.Comm | None = None  # NCCL writes its handle whenever it is ready
        self._comm: nccl.Comm | None = None  # the same, once it is
        self._aborted = False
        self._lock_of_end = threading.Lock()  # of the above
        self._leaving: threading.Thread | None = None  # the first communicator

    def meet(self, address: int, stream: int, seconds: float) -> None:
        """Until both ranks have met. Queues the first byte, out of device memory or into it: it makes the way.

        Raises DeadlineExceeded, or Unavailable where NCCL says why not.
        """
        deadline = threading.Timer(seconds, self.abort)
        deadline.daemon = True
        deadline.start()
        try:
            self._split()
            comm = self._comm
            if comm is not None:
                self._move(comm, address, 1, stream)  # may wait for the other, and is ended by `abort`
        except nccl.NCCLError as error:
            raise Unavailable(f"NCCL: {error}") from error
        finally:
            deadline.cancel()
        if self._aborted:
            raise DeadlineExceeded(f"the other end did not join the NCCL communicator in {seconds:g} s")

    def leave_meeting(self, seconds: float) -> None:
        """Ends the first communicator, which is of no more use: after the first byte has moved, before the next does.

        Its end frees memory, which waits for all that the device does and keeps every other call of CUDA's waiting: a
        kernel that waits for a lost peer meanwhile could not be seen to, and the process would stand still. Raises
        DeadlineExceeded.
        """
        with self._lock:
            meeting, self._meeting = self._meeting, None
            if meeting is not None:
                self._leaving = _in_background(lambda: nccl.comm_abort(meeting))
        if self._leaving is not None:
            self._leaving.join(seconds)
            if self._leaving.is_alive():
                raise DeadlineExceeded(f"the NCCL communicator in which both ends met did not end in {seconds:g} s")

    def move(self, address: int, num_bytes: int, stream: int) -> None:
        """Queues the sending of device memory on the stream, or the receiving into it. Raises Unavailable."""
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
        """What waits ends soon, and then the communicator, for which nobody waits. From any thread. Idempotent.

        NCCL frees memory at its end, which waits for whatever the device does, other communicators' kernels among it.
        """
        with self._lock_of_end:
            begun, self._aborted = self._aborted, True
        if not begun:
            _in_background(self._end)

    def _end(self) -> None:
        # An abort that overtakes a call which waits in its launch costs the process its CUDA context (NCCL 2.28.9).
        locked = self._lock.acquire(timeout=_CALL_SECONDS)
        try:
            # One whose kernel may wait comes first: the end of another waits for it. The first one's end is also that
            # of a split that is under way.
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
            self._tell_end()

    def _split(self) -> None:
        """Waits for the other end, twice."""
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
