"""The last event batches, encoded, for an index replica that lacks some of them. Bounded; knows no stream."""

from __future__ import annotations

from collections import deque

MAX_UNACKNOWLEDGED_BYTES = 8 << 20
_ACKNOWLEDGED_BYTES = 256 << 10  # kept beyond the acknowledgement: another replica may be a little behind


class EventWindow:
    """Batches of one epoch, in order and without a gap, the newest last."""

    def __init__(self, max_bytes: int = MAX_UNACKNOWLEDGED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()
        self._num_bytes = 0
        self._acknowledged_bytes = 0
        self._acknowledged = 0  # sequence
        self.epoch = 0
        self.last = 0  # sequence of the newest

    @property
    def first_kept(self) -> int:
        """The sequence of the oldest batch. 0: none."""
        return self.last - len(self._batches) + 1 if self._batches else 0

    def begin(self, epoch: int) -> None:
        """What is kept of another epoch is of no use."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._clear()

    def add(self, epoch: int, sequence: int, encoded: bytes) -> None:
        """Keeps a batch; the oldest go where there are too many."""
        self.begin(epoch)
        if self._batches and sequence != self.last + 1:
            self._clear()
        self._batches.append(encoded)
        self._num_bytes += len(encoded)
        self.last = sequence
        while self._num_bytes > self._max_bytes:
            self._drop_oldest()

    def acknowledge(self, sequence: int) -> None:
        """A replica has applied everything up to here."""
        for number in range(max(self._acknowledged + 1, self.first_kept), min(sequence, self.last) + 1):
            self._acknowledged_bytes += len(self._batches[number - self.first_kept])
        self._acknowledged = max(self._acknowledged, sequence)
        while self._acknowledged_bytes > _ACKNOWLEDGED_BYTES:
            self._drop_oldest()

    def since(self, sequence: int) -> list[bytes]:
        """The batches after one, as far as they are kept."""
        skipped = max(0, sequence + 1 - self.first_kept)
        return list(self._batches)[skipped:]

    def _drop_oldest(self) -> None:
        sequence = self.first_kept
        size = len(self._batches.popleft())
        self._num_bytes -= size
        if sequence <= self._acknowledged:
            self._acknowledged_bytes -= size

    def _clear(self) -> None:
        self._batches.clear()
        self._num_bytes = self._acknowledged_bytes = self._acknowledged = self.last = 0
