"""Runs the writes and reads of blocks on disk that the scheduler decided, on the host memory of the executor."""

from __future__ import annotations

from collections.abc import Sequence

from baton.worker.core import HostSlot
from baton.worker.executors.base import HostCopies
from baton.worker.scheduling.scheduler import Scheduler


class DiskCopier:
    """Starts what was decided, and reports its end."""

    def __init__(self, host: HostCopies, scheduler: Scheduler) -> None:
        self._host = host
        self._scheduler = scheduler

    @property
    def busy(self) -> bool:
        """Whether a request waits for a read."""
        blocks = self._scheduler.disk
        return blocks is not None and blocks.loading

    def land(self) -> None:
        """Reports what has ended. Call before each schedule."""
        if self._scheduler.disk is not None:
            for ended in self._scheduler.disk.disk.poll():
                self._scheduler.disk_ended(ended)

    def start(self) -> None:
        """Starts the decided writes and reads."""
        blocks = self._scheduler.disk
        if blocks is None:
            return
        for key, slots in blocks.take_reads():
            blocks.disk.begin_read(key, self._buffers(slots))
        for key, slots in blocks.take_writes():
            if not blocks.disk.begin_write(key, self._buffers(slots)):
                blocks.refused(key)

    def wait(self, seconds: float) -> None:
        """Waits until a read or write has ended, or for `seconds`."""
        if self._scheduler.disk is not None:
            self._scheduler.disk.disk.wait(seconds)

    def _buffers(self, slots: Sequence[HostSlot]) -> list[memoryview]:
        return [self._host.slot_bytes(slot) for slot in slots]
