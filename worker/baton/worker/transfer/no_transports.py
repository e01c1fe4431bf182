"""The transport of a worker that moves no KV: it listens nowhere, and peers have no transport in common with it."""

from __future__ import annotations

from collections.abc import Callable

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2
from baton.worker.transfer.base import (
    Inbound,
    InboundFenced,
    Outbound,
    Piece,
    PushFenced,
    TransportEvent,
    TransportTotals,
)
from baton.worker.transfer.event_queue import EventQueue


class NoTransports:
    """Implements Transport. `wake` is called when `poll` has events."""

    fences_locally = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._events = EventQueue(wake)

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        """Returns none: peers must not send."""
        return []

    def poll(self) -> list[TransportEvent]:
        return self._events.take()

    def totals(self) -> TransportTotals:
        return TransportTotals()

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        return {}

    def close(self) -> None:
        """Does nothing."""

    def open(self, inbound: Inbound) -> None:
        """Does nothing: no peer can write."""

    def num_landed_bytes(self, transfer_id: int) -> int:
        return 0

    def fence_inbound(self, transfer_id: int) -> None:
        self._events.post(InboundFenced(transfer_id))

    def cut_inbound(self, transfer_id: int) -> None:
        self._events.post(InboundFenced(transfer_id))

    def connect(self, outbound: Outbound) -> None:
        """Raises Mismatch."""
        raise Mismatch("this worker runs with transports=none: it sends no KV to others", field="transports")

    def push(self, push_id: int, piece: Piece) -> None:
        """Does nothing: no push was begun."""

    def finish(self, push_id: int) -> None:
        """Does nothing: no push was begun."""

    def fence_outbound(self, push_id: int) -> None:
        self._events.post(PushFenced(push_id))

    def cut_outbound(self, push_id: int) -> None:
        self._events.post(PushFenced(push_id))

    def forget(self, push_id: int) -> None:
        """Does nothing: no push was begun."""
