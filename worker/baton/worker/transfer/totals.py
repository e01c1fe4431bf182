"""Counts the bytes that each kind of transport moved, and its failures. Thread-safe."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable

from baton.worker.transfer.base import TransportTotals


class KindTotals:
    """Totals of one kind since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = TransportTotals()

    @property
    def now(self) -> TransportTotals:
        """Returns a copy."""
        with self._lock:
            return dataclasses.replace(self._totals)

    def received(self, num_bytes: int, seconds: float) -> None:
        """Counts a piece that was written to its blocks."""
        with self._lock:
            self._totals.num_received_pieces += 1
            self._totals.num_received_bytes += num_bytes
            self._totals.receive_seconds += seconds

    def sent(self, num_bytes: int, seconds: float) -> None:
        """Counts a piece that was sent."""
        with self._lock:
            self._totals.num_sent_pieces += 1
            self._totals.num_sent_bytes += num_bytes
            self._totals.send_seconds += seconds

    def stray(self) -> None:
        """Counts a piece of no open transfer."""
        with self._lock:
            self._totals.num_stray_pieces += 1

    def corrupt(self) -> None:
        """Counts a piece whose checksum did not match."""
        with self._lock:
            self._totals.num_corrupt_pieces += 1

    def bad_connection(self) -> None:
        """Counts a connection that did not speak this protocol."""
        with self._lock:
            self._totals.num_bad_connections += 1

    def stranger(self) -> None:
        """Counts a connection that did not present the receiver's key."""
        with self._lock:
            self._totals.num_strangers += 1

    def refused(self) -> None:
        """Counts a sender that was refused."""
        with self._lock:
            self._totals.num_refused += 1

    def fell_back(self) -> None:
        """Counts a connection that fell back from this kind to another."""
        with self._lock:
            self._totals.num_fallbacks += 1


class Totals:
    """Totals of all kinds."""

    def __init__(self, names: Iterable[str]) -> None:
        self._kinds = {name: KindTotals() for name in names}

    def of(self, name: str) -> KindTotals:
        """Returns the totals of a kind, which need not be one of this worker's."""
        return self._kinds.setdefault(name, KindTotals())

    def by_kind(self) -> dict[str, TransportTotals]:
        return {name: totals.now for name, totals in list(self._kinds.items())}

    def all(self) -> TransportTotals:
        kinds = [dataclasses.astuple(totals) for totals in self.by_kind().values()]
        return TransportTotals(*(sum(values) for values in zip(*kinds, strict=True)))
