"""The receiver's slots that a sender may fill. The receiver returns each by a credit on their connection.

The thread that needs a slot reads the credits itself. A thread that waited for credits would have to be woken, and to
wake another: 0.3 ms, in which most pieces are copied.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from baton.rpc.errors import DataLoss
from baton.worker.transfer.wire.frames import CREDIT_BYTES, decode_credit
from baton.worker.transfer.wire.sockets import Connection


class FreeSlots:
    """Thread-safe, except `take`: only the thread that starts pieces calls it."""

    def __init__(self, sock: Connection, num_slots: int) -> None:
        self._sock = sock
        self._num_slots = num_slots
        self._free = deque(range(num_slots))
        self._reading = threading.Lock()
        self._credit = bytearray(CREDIT_BYTES)
        self._num_read = 0  # bytes of the credit

    def any(self) -> bool:
        """Returns whether a slot is free.

        Never waits. Raises ConnectionError at the stream's end, DataLoss for an invalid credit.
        """
        if not self._free and self._reading.acquire(blocking=False):  # else another thread reads already
            try:
                self._read()
            finally:
                self._reading.release()
        return bool(self._free)

    def take(self) -> int:
        """Takes a free slot. Call only after `any` returned True."""
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
            raise DataLoss(f"a credit was received for slot {slot}, which is not in use")
        self._free.append(slot)
