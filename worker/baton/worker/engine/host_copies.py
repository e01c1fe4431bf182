"""Runs the copies to and from host memory, and below it, that the scheduler decided, on the executor."""

from __future__ import annotations

import logging

from baton.worker.engine.disk_copies import DiskCopier
from baton.worker.executors.base import DeviceLost, HostCopies, RestoreCopy
from baton.worker.requests.outputs import EngineCounters
from baton.worker.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.5e-3  # with nothing else to do; frames wait as long


class HostCopier:
    """Starts copies, and reports their end to the scheduler. A failed copy costs a computation, nothing else."""

    def __init__(
        self, host: HostCopies | None, scheduler: Scheduler, counters: EngineCounters, bytes_per_block: int
    ) -> None:
        self._host = host
        self._scheduler = scheduler
        self._counters = counters
        self._bytes_per_block = bytes_per_block
        self._disk = None if host is None else DiskCopier(host, scheduler)

    @property
    def busy(self) -> bool:
        """Whether a request waits for a copy."""
        return self._host is not None and (len(self._scheduler.restores) > 0 or self._reads)

    @property
    def _reads(self) -> bool:
        return self._disk is not None and self._disk.busy

    @property
    def restore_bytes_per_second(self) -> float:
        """Measured bandwidth. 0: unknown."""
        seconds = self._scheduler.restores.cost.seconds_per_block
        return self._bytes_per_block / seconds if seconds else 0.0

    def land(self) -> None:
        """Reports copies that have landed, and how many can be started.

        Call before each schedule. Raises DeviceLost.
        """
        if self._host is None or self._disk is None:
            return
        if not len(self._scheduler.batch):
            self._host.hurry()
        landed = self._host.poll()
        counters, offloads = self._counters, self._scheduler.offloads
        counters.offload_seconds += landed.offload_seconds
        for slot in landed.slots:
            offloads.landed(slot)
        counters.num_offloaded_blocks += len(landed.slots)
        counters.num_offloaded_bytes += len(landed.slots) * self._bytes_per_block
        for restore_id, seconds in landed.restores:
            num_blocks = self._scheduler.restore_ended(restore_id, landed=True)
            counters.num_restored_blocks += num_blocks
            counters.num_restored_bytes += num_blocks * self._bytes_per_block
            counters.restore_bytes.observe(num_blocks * self._bytes_per_block)
            if seconds:
                landed.timed.append((num_blocks, seconds))
        for num_blocks, seconds in landed.timed:
            self._scheduler.restores.cost.observe(num_blocks, seconds)
            counters.restore_seconds += seconds
        offloads.capacity = self._host.capacity()
        self._disk.land()

    def start(self) -> None:
        """Starts the decided copies. Call between schedule and launch. Raises DeviceLost."""
        if self._host is None or self._disk is None:
            return
        if offloads := self._scheduler.offloads.take(self._scheduler.pool.num_empty):
            try:
                self._host.offload(offloads)
                self._counters.offload_bytes.observe(len(offloads) * self._bytes_per_block)
            except DeviceLost:
                raise
            except Exception as error:  # any error of a device: the cache loses the blocks, requests do not
                _log.error("%d blocks could not be copied to host memory", len(offloads), exc_info=error)
                for _, slot in offloads:
                    self._scheduler.offloads.failed(slot)
        for restore in self._scheduler.restores.take():
            self._start_restore(self._host, restore)
        self._disk.start()

    def wait(self) -> None:
        """Waits a moment for copies, or until one has landed."""
        if self._disk is not None and self._reads and not len(self._scheduler.restores):
            self._disk.wait(_WAIT_SECONDS)
        elif self._host is not None:
            self._host.wait(_WAIT_SECONDS)

    def _start_restore(self, host: HostCopies, restore: RestoreCopy) -> None:
        try:
            host.restore(restore)
        except DeviceLost:
            raise
        except Exception as error:
            _log.error("%d blocks could not be copied from host memory", len(restore.copies), exc_info=error)
            self._scheduler.restore_ended(restore.restore_id, landed=False)
