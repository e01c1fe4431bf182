"""The last event batches, encoded, for kvstore replicas that lack some of them. Bounded; knows no stream."""

from __future__ import annotations

from collections import deque

MAX_UNACKNOWLEDGED_BYTES = 8 << 20
_ACKNOWLEDGED_BYTES = 256 << 10  # kept after their acknowledgement: another replica may be slightly behind


class EventWindow:
    """Batches of one epoch, in order and without gaps."""

    def __init__(self, max_bytes: int = MAX_UNACKNOWLEDGED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()
        self._num_bytes = 0
        self._acknowledged_bytes = 0
        self._acknowledged = 0  # sequence number
        self.epoch = 0
        self.last = 0  # sequence number of the newest batch

    @property
    def first_kept(self) -> int:
        """The sequence number of the oldest batch. 0: none."""
        return self.last - len(self._batches) + 1 if self._batches else 0

    def begin(self, epoch: int) -> None:
        """Drops the batches of other epochs."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._clear()

    def add(self, epoch: int, sequence: int, encoded: bytes) -> None:
        """Adds a batch. Drops the oldest ones above the limit."""
        self.begin(epoch)
        if self._batches and sequence != self.last + 1:
            self._clear()
        self._batches.append(encoded)
        self._num_bytes += len(encoded)
        self.last = sequence
        while self._num_bytes > self._max_bytes:
            self._drop_oldest()

    def acknowledge(self, sequence: int) -> None:
        """Records that a replica has applied everything up to `sequence`."""
        for number in range(max(self._acknowledged + 1, self.first_kept), min(sequence, self.last) + 1):
            self._acknowledged_bytes += len(self._batches[number - self.first_kept])
        self._acknowledged = max(self._acknowledged, sequence)
        while self._acknowledged_bytes > _ACKNOWLEDGED_BYTES:
            self._drop_oldest()

    def since(self, sequence: int) -> list[bytes]:
        """Returns the kept batches after `sequence`."""
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
