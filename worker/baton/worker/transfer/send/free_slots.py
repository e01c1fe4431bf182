"""Which slots of the receiver a sender may fill. The receiver gives each back by a credit on their connection.

Whoever needs a slot reads the credits that are there. A thread that slept until one comes would have to be woken up by
the receiver, and wake up another: 0.3 ms, in which most pieces are copied.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from baton.rpc.errors import DataLoss
from baton.worker.transfer.wire.frames import CREDIT_BYTES, decode_credit
from baton.worker.transfer.wire.sockets import Connection


class FreeSlots:
    """Thread-safe, but for `take`, which belongs to whoever starts pieces."""

    def __init__(self, sock: Connection, num_slots: int) -> None:
        self._sock = sock
        self._num_slots = num_slots
        self._free = deque(range(num_slots))
        self._reading = threading.Lock()
        self._credit = bytearray(CREDIT_BYTES)
        self._num_read = 0  # of its bytes

    def any(self) -> bool:
        """Never waits. Raises ConnectionError at the connection's end, DataLoss for a credit that makes no sense."""
        if not self._free and self._reading.acquire(blocking=False):  # else somebody reads already
            try:
                self._read()
            finally:
                self._reading.release()
        return bool(self._free)

    def take(self) -> int:
        """One of them, of which there are any."""
        return self._free.popleft()

    def _read(self) -> None:
        while len(self._free) < self._num_slots:
            rest = memoryview(self._credit)[self._num_read :]
            try:
                count = self._sock.recvmsg_into([rest], 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("the peer ended the connection")
            self._num_read += count
            if self._num_read == CREDIT_BYTES:
                self._num_read = 0
                self._give_back(decode_credit(self._credit))

    def _give_back(self, slot: int) -> None:
        if slot >= self._num_slots or slot in self._free:
            raise DataLoss(f"a credit for slot {slot} came, which is not in use")
        self._free.append(slot)
