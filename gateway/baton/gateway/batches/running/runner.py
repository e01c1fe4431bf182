"""Runs the batches of all tenants: takes leases of those that no gateway runs, and keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec

from baton.gateway.batches.files import new_file_id
from baton.gateway.batches.records import BATCH, FILE, StoredBatch, Unreadable, batch_of, file_blob
from baton.gateway.batches.running.batch_run import BatchRun, RunnerParts
from baton.gateway.batches.running.turns import MAX_OF_TENANT, in_turn
from baton.gateway.batches.state.store import Commit, Entry, LeaseLost
from baton.gateway.batches.unreadable import failed_in_place_of
from baton.gateway.metrics.batches import BatchLoad
from baton.rpc.errors import NoCapacity, ServiceError, Unavailable

_log = logging.getLogger(__name__)

# A batch whose gateway died is taken over after this time.
LEASE_SECONDS = 3.0
_RENEWALS_PER_LEASE = 4
_POLL_SECONDS = 1.0
_SWEEP_SECONDS = 60.0
_SWEPT_AT_ONCE = 100
_STOP_SECONDS = 3.0
_LEFT_SECONDS = 10.0
_MAX_BATCHES = 64  # that one gateway runs at once


class BatchRunner:
    """Runs batches for the lifetime of `running`."""

    def __init__(self, parts: RunnerParts, lease_seconds: float = LEASE_SECONDS) -> None:
        self._parts = parts
        self._lease_seconds = lease_seconds
        self._woken = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: Counter[str] = Counter()  # batches by tenant
        self._runs: dict[str, BatchRun] = {}
        self._left_until: dict[str, float] = {}  # when batches that are not served here are looked at again
        self._swept = 0.0
        self._num_open = 0  # batches of all gateways that have not ended, when they were last looked for

    @property
    def num_running(self) -> int:
        """Returns the number of batches that run here."""
        return len(self._tasks)

    def load(self) -> BatchLoad:
        """Returns what there is now, for metrics."""
        window, runs = self._parts.window, list(self._runs.values())
        unrecorded = sum(run.num_unrecorded for run in runs)
        return BatchLoad(self._num_open, len(runs), unrecorded, window.in_flight, window.limit)

    def wake(self) -> None:
        """Looks for batches at once."""
        self._woken.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs batches. At the end, other gateways may take them at once."""
        looking = asyncio.get_running_loop().create_task(self._look())
        try:
            yield
        finally:
            tasks = [looking, *self._tasks.values()]
            for _ in range(2):  # the second time, results that cannot be stored are given up: their lines run again
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=_STOP_SECONDS)

    async def _look(self) -> None:
        while True:
            try:
                await self._take()
                await self._pass_cancellations()
                await self._sweep()
            except Unavailable as error:
                _log.warning("cannot look for batches: %s", error.message)
            except Exception:
                _log.exception("cannot look for batches")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _POLL_SECONDS)
            self._woken.clear()

    async def _take(self) -> None:
        state, now = self._parts.state, time.monotonic()
        open_batches = await state.open_batches()
        self._num_open = len(open_batches)
        waiting = [
            entry
            for entry in open_batches
            if entry.name not in self._tasks and self._left_until.get(entry.name, 0.0) <= now
        ]
        for entry in in_turn(waiting, self._held):
            if len(self._tasks) >= _MAX_BATCHES:
                return
            if self._held[entry.tenant] >= MAX_OF_TENANT:
                continue
            fence = await state.lease(entry.name, self._lease_seconds)
            if fence is not None:
                self._held[entry.tenant] += 1
                task = asyncio.get_running_loop().create_task(self._hold(entry, fence))
                self._tasks[entry.name] = task

    async def _pass_cancellations(self) -> None:
        names = list(self._runs)
        for name, cancelled in zip(names, await self._parts.state.cancelled_at(names), strict=True):
            if cancelled is not None and name in self._runs:
                self._runs[name].cancelled.set()

    async def _hold(self, entry: Entry, fence: int) -> None:
        """Runs one batch under its lease."""
        state, batch_id = self._parts.state, entry.name
        try:
            (record,) = await state.load(BATCH, [batch_id])
            if record is None:
                await state.close_batch(entry)
                return
            stored = await self._readable(entry, record, fence)
            if not (stored.outcome or self._parts.serves(stored.batch.endpoint) or _has_expired(stored)):
                # Another gateway may serve it, as during an update.
                self._leave(batch_id)
                await state.release(batch_id, fence)
                return
            run = self._runs[batch_id] = BatchRun(self._parts, stored, fence)
            _log.info("running %s", batch_id, extra={"fence": fence})
            await self._keep(run, batch_id, fence)
            _log.info("%s has ended", batch_id)
        except asyncio.CancelledError:
            raise
        except LeaseLost:
            _log.warning("another gateway took %s over", batch_id)
        except (Unavailable, NoCapacity) as error:
            _log.warning("%s stopped and will be run again: %s", batch_id, error.message)
        except Exception as error:
            _log.exception("%s was stopped by an unexpected error", batch_id)
            await self._count_defect(batch_id, fence, error)
        finally:
            self._runs.pop(batch_id, None)
            self._tasks.pop(batch_id, None)
            self._held[entry.tenant] -= 1

    async def _readable(self, entry: Entry, record: bytes, fence: int) -> StoredBatch:
        """Decodes a record. One that cannot be decoded is replaced by that of a batch that failed."""
        try:
            return batch_of(record)
        except Unreadable as error:
            _log.error("%s fails: %s", entry.name, error.message)
            output_ids = new_file_id(), new_file_id()
            stored = failed_in_place_of(entry, record, error.message, output_ids, int(time.time()))
        await self._parts.state.commit(entry.name, fence, Commit(msgspec.json.encode(stored)))
        self._parts.counters.unreadable_batches += 1
        return stored

    async def _count_defect(self, batch_id: str, fence: int, error: Exception) -> None:
        """Records an unexpected error, which may repeat: meanwhile, others have the batch's place."""
        state = self._parts.state
        goes_on = False
        try:
            (record,) = await state.load(BATCH, [batch_id])
            if record is not None:
                goes_on = await BatchRun(self._parts, batch_of(record), fence).stopped_by(error)
            await state.release(batch_id, fence)
        except Exception as second:
            _log.warning("cannot record why %s was stopped: %s", batch_id, second)
        if not goes_on:
            self._leave(batch_id)

    def _leave(self, batch_id: str) -> None:
        """Takes a batch no more for a while."""
        self._left_until[batch_id] = time.monotonic() + _LEFT_SECONDS

    async def _keep(self, run: BatchRun, batch_id: str, fence: int) -> None:
        """Runs a batch and renews its lease. Raises what ended it."""
        state, work = self._parts.state, asyncio.get_running_loop().create_task(run.run())
        is_stopped = True
        try:
            while not work.done():
                await asyncio.wait((work,), timeout=self._lease_seconds / _RENEWALS_PER_LEASE)
                if not work.done():
                    with contextlib.suppress(Unavailable):  # whether the lease still holds, a commit decides
                        await state.renew(batch_id, fence, self._lease_seconds)
            is_stopped = False
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if is_stopped:
                with contextlib.suppress(ServiceError):
                    await state.release(batch_id, fence)

    async def _sweep(self) -> None:
        """Deletes what has expired."""
        now = time.time()
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        self._left_until = {name: until for name, until in self._left_until.items() if until > time.monotonic()}
        for entry in await self._parts.state.expired(now, _SWEPT_AT_ONCE):
            try:
                if entry.kind == FILE:
                    await self._parts.files.blobs.delete(file_blob(entry.name))
                await self._parts.state.delete(entry)
            except Unavailable as error:
                _log.warning("cannot delete %s, which has expired: %s", entry.name, error.message)


def _has_expired(stored: StoredBatch) -> bool:
    return stored.batch.expires_at <= time.time()
