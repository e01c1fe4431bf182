"""Estimates a transport's bandwidth from its totals. Owns no clock."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import control_pb2
from baton.worker.transfer.base import TransportTotals
from baton.worker.transport_kinds import wire_of

_NEW_WEIGHT = 0.2  # weight of the bytes since the last observation


@dataclass(slots=True)
class _Direction:
    rate: float = 0.0  # bytes a second while bytes moved; 0: unknown
    num_bytes: int = 0
    seconds: float = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes <= self.num_bytes or seconds <= self.seconds:
            return
        rate = (num_bytes - self.num_bytes) / (seconds - self.seconds)
        self.rate = rate if self.rate == 0 else (1 - _NEW_WEIGHT) * self.rate + _NEW_WEIGHT * rate
        self.num_bytes, self.seconds = num_bytes, seconds


class Bandwidth:
    """The bandwidth of one transport, in both directions."""

    def __init__(self) -> None:
        self._sent = _Direction()
        self._received = _Direction()

    @property
    def received(self) -> float:
        """Bytes a second, measured while bytes were received. 0: unknown."""
        return self._received.rate

    @property
    def known(self) -> bool:
        """Whether bytes moved in either direction."""
        return self._sent.rate > 0 or self._received.rate > 0

    def observe(self, totals: TransportTotals) -> None:
        """Updates the estimates from current totals."""
        self._sent.observe(totals.num_sent_bytes, totals.send_seconds)
        self._received.observe(totals.num_received_bytes, totals.receive_seconds)

    def message(self, name: str) -> control_pb2.TransportRate:
        """Returns the contract's message for the transport `name`."""
        kind, plugin = wire_of(name)
        return control_pb2.TransportRate(
            kind=kind,
            plugin=plugin,
            sent_bytes_per_second=self._sent.rate,
            received_bytes_per_second=self._received.rate,
        )
