"""The sending end of an rdma connection: gathers pieces into staging memory and writes them into the peer's slots.

A sender has an agent of its own. `abort` is therefore a fence whatever the peer does, and nothing that a sender knows
of a peer outlives the connection, which a restarted peer would contradict.

    put -> gathering -> writing -> ended        put, done and wait of any pending move all copies on
              |            |
              +------------+---> failed: the agent is closed, and every copy of this sender with it
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from baton.rpc.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unavailable
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.bulk import Announce, Slots, no_announcement
from baton.worker.transfer.kinds.rdma.descriptors import RemoteRegion
from baton.worker.transfer.kinds.rdma.nixl import Agent, Copy, Memory
from baton.worker.transfer.kinds.rdma.staging import Gathered, Region, Staging

_SHORTEST_NAP_SECONDS = 20e-6
_LONGEST_NAP_SECONDS = 1e-3
_NAP_FRACTION = 8  # of the elapsed wait: polls stay cheap, and late by at most this fraction


class RdmaCopy:
    """The copy of one piece. The sender's thread uses it."""

    def __init__(self, sender: RdmaSender, gathered: Gathered, slot: int, deadline: float) -> None:
        self.gathered = gathered
        self.slot = slot
        self.deadline = deadline
        self.copy: Copy | None = None
        self.ended = False
        self._sender = sender

    def done(self) -> bool:
        """Returns whether the copy has ended. Raises Unavailable or DeadlineExceeded if it failed."""
        if not self.ended:
            self._sender.advance()
        return self.ended

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` and returns `done`."""
        return _waited(self.done, seconds)


class RdmaSender:
    """Implements BulkSender."""

    announces_first = False

    def __init__(
        self,
        agent: Agent,
        staging: Staging,
        slots: Slots,
        remote: RemoteRegion,
        copy_seconds: float,
        connect_seconds: float,
        closed: Callable[[], None],
    ) -> None:
        """Owns the agent. Raises Mismatch if the peer's description is unusable, Unavailable if nothing reaches it;
        then it is closed."""
        self._agent = agent
        self._staging = staging
        self._slots = slots
        self._remote = remote
        self._copy_seconds = copy_seconds
        self._closed = closed
        self._pending: deque[RdmaCopy] = deque()  # unfinished copies, oldest first
        self._aborted = threading.Event()
        self._problem: ServiceError | None = None
        self._region: Region | None = None
        self._open = True
        try:
            self._region = staging.allocate(slots.num_slots * slots.slot_bytes)
            agent.register(self._region.memory)
            agent.join(remote.agent, remote.metadata)
            self._reach(connect_seconds)
        except BaseException:
            self.close()
            raise

    def put(
        self, piece: Piece, slot: int, conversion: KvConversion | None, announce: Announce = no_announcement
    ) -> RdmaCopy:
        """Starts a copy.

        Raises InvalidRequest for an unknown slot or a piece that does not fit, Unavailable after a failure.
        """
        if not 0 <= slot < self._slots.num_slots:
            raise InvalidRequest(f"slot {slot} is out of range: the receiver has {self._slots.num_slots}")
        if any(pending.slot == slot for pending in self._pending):
            raise InvalidRequest(f"slot {slot} is still being filled")
        self._check()
        assert self._region is not None, "a closed sender has failed"
        limit = self._slots.slot_bytes
        gathered = self._staging.gather(piece, conversion, self._region, slot * limit, limit)
        pending = RdmaCopy(self, gathered, slot, time.monotonic() + self._copy_seconds)
        self._pending.append(pending)
        self.advance()
        return pending

    def advance(self) -> None:
        """Advances every copy. Raises the error of a failed copy: then all have ended."""
        try:
            self._check()
            for pending in self._pending:
                self._move(pending)
        except ServiceError as error:
            self._fail(error)
            raise
        while self._pending and self._pending[0].ended:
            self._pending.popleft()

    def abort(self) -> None:
        """Makes the connection's thread end all copies, at its next call."""
        self._aborted.set()

    def close(self) -> None:
        """Ends all copies: when it returns, neither the staging memory is read nor the peer's memory written."""
        self._fail(Unavailable(f"the connection to {self._remote.agent} is closed"))
        region, self._region = self._region, None
        if region is not None:
            region.close()
        if self._open:
            self._open = False
            self._closed()

    def _reach(self, seconds: float) -> None:
        """Completes the connection with one byte.

        A process that ends during UCX's handshake may crash the other end.
        """
        copy = self._write(0, 1)
        if not _waited(copy.done, seconds):
            raise Unavailable(f"cannot reach {self._remote.agent} over rdma: nothing arrived in {seconds:g} s")

    def _move(self, pending: RdmaCopy) -> None:
        if pending.ended:
            return
        if pending.copy is None:
            ready = pending.gathered.ready
            if ready is None or ready.done():
                pending.copy = self._write(pending.slot * self._slots.slot_bytes, pending.gathered.num_bytes)
        if pending.copy is not None and pending.copy.done():
            pending.ended = True
        elif time.monotonic() >= pending.deadline:
            raise DeadlineExceeded(
                f"{self._remote.agent} did not accept {pending.gathered.num_bytes} bytes in {self._copy_seconds:g} s"
            )

    def _write(self, start: int, num_bytes: int) -> Copy:
        assert self._region is not None, "a closed sender has failed"
        ours, theirs = self._region.memory, self._remote.memory
        return self._agent.write(_part(ours, start, num_bytes), _part(theirs, start, num_bytes), self._remote.agent)

    def _check(self) -> None:
        if self._problem is not None:
            raise Unavailable(f"the connection to {self._remote.agent} has failed: {self._problem.message}")
        if self._aborted.is_set():
            raise Unavailable(f"copies to {self._remote.agent} were aborted")

    def _fail(self, problem: ServiceError) -> None:
        self._problem = self._problem or problem
        self._pending.clear()
        self._agent.close()


def _part(memory: Memory, start: int, num_bytes: int) -> Memory:
    return Memory(memory.address + start, num_bytes, memory.on_device, memory.device)


def _waited(done: Callable[[], bool], seconds: float) -> bool:
    """Waits at most `seconds` and returns `done()`. Sleeps between polls."""
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited >= seconds:
            return False
        nap = min(max(waited / _NAP_FRACTION, _SHORTEST_NAP_SECONDS), _LONGEST_NAP_SECONDS)
        time.sleep(min(nap, seconds - waited))
    return True
