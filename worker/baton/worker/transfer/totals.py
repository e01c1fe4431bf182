"""What each kind of transport moved, and what went wrong with it. Thread-safe."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable

from baton.worker.transfer.base import TransportTotals


class KindTotals:
    """Of one kind, since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = TransportTotals()

    @property
    def now(self) -> TransportTotals:
        """A copy."""
        with self._lock:
            return dataclasses.replace(self._totals)

    def received(self, num_bytes: int, seconds: float) -> None:
        """A piece is in its blocks."""
        with self._lock:
            self._totals.num_received_pieces += 1
            self._totals.num_received_bytes += num_bytes
            self._totals.receive_seconds += seconds

    def sent(self, num_bytes: int, seconds: float) -> None:
        """A piece is on its way."""
        with self._lock:
            self._totals.num_sent_pieces += 1
            self._totals.num_sent_bytes += num_bytes
            self._totals.send_seconds += seconds

    def stray(self) -> None:
        """A piece of no open transfer."""
        with self._lock:
            self._totals.num_stray_pieces += 1

    def corrupt(self) -> None:
        """A checksum did not match."""
        with self._lock:
            self._totals.num_corrupt_pieces += 1

    def bad_connection(self) -> None:
        """A connection spoke something else."""
        with self._lock:
            self._totals.num_bad_connections += 1

    def stranger(self) -> None:
        """A connection did not show the receiver's key."""
        with self._lock:
            self._totals.num_strangers += 1

    def refused(self) -> None:
        """A sender was told no."""
        with self._lock:
            self._totals.num_refused += 1

    def fell_back(self) -> None:
        """A connection of this kind could not be had; another kind serves."""
        with self._lock:
            self._totals.num_fallbacks += 1


class Totals:
    """Of all kinds."""

    def __init__(self, names: Iterable[str]) -> None:
        self._kinds = {name: KindTotals() for name in names}

    def of(self, name: str) -> KindTotals:
        """Of a kind that this worker has, or was asked for."""
        return self._kinds.setdefault(name, KindTotals())

    def by_kind(self) -> dict[str, TransportTotals]:
        """As of now."""
        return {name: totals.now for name, totals in list(self._kinds.items())}

    def all(self) -> TransportTotals:
        """As of now, all kinds together."""
        kinds = [dataclasses.astuple(totals) for totals in self.by_kind().values()]
        return TransportTotals(*(sum(values) for values in zip(*kinds, strict=True)))
