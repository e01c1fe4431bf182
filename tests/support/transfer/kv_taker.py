"""A receiver of blocks, for a separate process."""

from __future__ import annotations

from support.transfer.kv_pusher import EPOCH, GENERATION, SOURCE, make_pool, make_transports, next_event

from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.transfer.base import Inbound, TransportEvent

TARGET = tuple(BlockId(block) for block in range(40, 40 + len(SOURCE)))


class KvTaker:
    """Receives one transfer at a time."""

    def __init__(self, kind: str) -> None:
        self._transports = make_transports(kind, make_pool(2))

    def address(self) -> kv_pb2.TransportAddress:
        (address,) = self._transports.addresses
        return address

    def open(self, number: int) -> None:
        self._transports.open(Inbound(number, EPOCH, GENERATION, TARGET, checksum=False))

    def next_event(self, number: int) -> TransportEvent:
        """Waits until the transfer has landed or failed."""
        return next_event(self._transports, number)

    def close(self) -> None:
        self._transports.close()
