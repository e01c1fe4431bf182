"""One batch while this gateway holds its lease: validates it, runs its lines, writes its result files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.gateway.access.identity import Identity
from baton.gateway.batches.files import Files, new_file_id
from baton.gateway.batches.records import BATCH, KEPT_SECONDS, StoredBatch, batch_folder, file_blob
from baton.gateway.batches.running.line_call import Handler
from baton.gateway.batches.running.line_runner import LineRunner
from baton.gateway.batches.running.lines import LineProblem, lines_of, request_of
from baton.gateway.batches.running.results import LineResult, PartWriter, join_parts, not_run
from baton.gateway.batches.running.validation import validate
from baton.gateway.batches.running.window import Window
from baton.gateway.batches.state.store import Commit, Entry, Progress, StateStore
from baton.gateway.batches.types import BatchError, BatchErrors, FileObject
from baton.gateway.metrics.batches import BatchCounters
from baton.rpc.errors import InvalidRequest, NotFound

# Unexpected errors that end a batch. What fails each time it is run would otherwise run forever.
MAX_DEFECTS = 3
_FLUSH_POLL_SECONDS = 0.1
_EXPIRED = LineProblem("batch_expired", "This request could not be executed before the completion window expired.")


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What every batch of a gateway uses."""

    state: StateStore
    files: Files
    window: Window
    serves: Callable[[str], bool]  # an endpoint
    handler_of: Callable[[str], Handler]  # of an endpoint. Raises InvalidRequest
    identity_of: Callable[[str], Identity]  # of a tenant. Raises NotFound, Unavailable
    max_lines: int
    counters: BatchCounters


class BatchRun:
    """Runs a batch to its end. `cancelled` is set from outside. Raises LeaseLost, Unavailable."""

    def __init__(self, parts: RunnerParts, stored: StoredBatch, fence: int) -> None:
        self._parts = parts
        self._stored = stored
        self._batch = stored.batch
        self._fence = fence
        self.cancelled = asyncio.Event()

    @property
    def num_unrecorded(self) -> int:
        """Returns the number of lines without a recorded result."""
        counts = self._batch.request_counts
        return counts.total - counts.completed - counts.failed

    async def run(self) -> None:
        """Goes on where the batch is. Returns when it has ended."""
        stored, batch = self._stored, self._batch
        try:
            if batch.status == "validating":
                await self._validate()
            if batch.status == "in_progress" and not stored.outcome:
                await self._execute()
            if not stored.is_final:
                await self._finish()
        except (NotFound, InvalidRequest) as error:
            # The input file or the tenant was deleted, or this gateway no longer serves the endpoint.
            code = "not_found" if isinstance(error, NotFound) else "invalid_request"
            await self._fail([BatchError(code=code, message=error.message, param=error.field or None)])
        await self._clean_up()

    async def stopped_by(self, error: Exception) -> bool:
        """Records that an unexpected error stopped the run. Returns whether the batch goes on at once, to its end.

        The last of MAX_DEFECTS ends the batch as failed, with the results that it has.
        """
        stored, batch = self._stored, self._batch
        stored.num_defects += 1
        if stored.num_defects < MAX_DEFECTS:
            await self._commit()
            return False
        message = f"the batch was stopped {stored.num_defects} times by an internal error: {type(error).__name__}"
        errors = [BatchError(code="internal_error", message=message)]
        if batch.status == "in_progress" and stored.num_defects == MAX_DEFECTS:
            batch.errors = BatchErrors(data=errors)
            await self._end_lines("failed")
        else:  # before the first line, or while its results were written
            await self._fail(errors)
        return True

    async def _validate(self) -> None:
        batch, parts = self._batch, self._parts
        found = await validate(self._read, batch.endpoint, parts.max_lines)
        if found.errors:
            await self._fail(found.errors)
            return
        batch.status, batch.in_progress_at = "in_progress", _now()
        batch.request_counts.total = found.num_lines
        await self._commit()

    async def _fail(self, errors: list[BatchError]) -> None:
        self._batch.status, self._batch.failed_at = "failed", _now()
        self._batch.errors = BatchErrors(data=errors)
        await self._commit()

    # Running lines.

    async def _execute(self) -> None:
        state, batch = self._parts.state, self._batch
        progress = await state.progress(batch.id)
        blobs, made = self._parts.files.blobs, self._record_with
        writer = PartWriter(state, blobs, batch.id, self._fence, made, time.monotonic)
        try:
            outcome = await self._run_lines(progress, writer)
        finally:
            # What has ended is kept, also when the gateway stops.
            await writer.flush()
        if outcome == "expired":
            await self._expire_lines(writer)
        await self._end_lines(outcome)

    async def _end_lines(self, outcome: str) -> None:
        stored, batch = self._stored, self._batch
        stored.outcome, now = outcome, _now()
        stored.output_id, stored.error_id = new_file_id(), new_file_id()
        if outcome == "cancelled":
            batch.status, batch.cancelling_at = "cancelling", now
        else:
            batch.status, batch.finalizing_at = "finalizing", now
        await self._commit()

    async def _run_lines(self, progress: Progress, writer: PartWriter) -> str:
        """Runs the lines that are not recorded, until the batch is cancelled or expires. Returns the outcome."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._run_and_flush(progress, writer))
        cancelled = loop.create_task(self.cancelled.wait())
        left = max(0.0, self._batch.expires_at - time.time())
        try:
            await asyncio.wait((work, cancelled), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return "completed"
            return "cancelled" if cancelled.done() else "expired"
        except* Exception as group:
            raise _first(group) from None
        finally:
            work.cancel()
            cancelled.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _run_and_flush(self, progress: Progress, writer: PartWriter) -> None:
        parts, batch = self._parts, self._batch
        identity, handler = parts.identity_of(self._stored.tenant), parts.handler_of(batch.endpoint)
        runner = LineRunner(parts.window, batch.id, batch.endpoint, handler, identity, writer.add, parts.counters)
        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(_flush_when_due(writer))
            async with asyncio.TaskGroup() as running:
                async for line in lines_of(self._read):
                    if not progress.has(line.index):
                        if writer.is_behind:
                            await writer.flush()
                        await runner.enter()
                        running.create_task(runner.run(line))
                        # Lines that begin together would keep the event loop from clients for as long as all of them
                        # take; one begins in each of its turns.
                        await asyncio.sleep(0)
            flushing.cancel()

    async def _expire_lines(self, writer: PartWriter) -> None:
        progress = await self._parts.state.progress(self._batch.id)
        async for line in lines_of(self._read):
            if not progress.has(line.index):
                custom_id = request_of(line.data, (self._batch.endpoint,)).custom_id
                writer.add(not_run(line.index, custom_id, _EXPIRED))
                if writer.is_full:
                    await writer.flush()
        await writer.flush()

    def _record_with(self, results: list[LineResult]) -> bytes:
        counts, totals = self._batch.request_counts, self._parts.counters
        completed = sum(not one.is_error for one in results)
        failed = sum(one.is_error and one.is_run for one in results)
        counts.completed, totals.completed_lines = counts.completed + completed, totals.completed_lines + completed
        counts.failed, totals.failed_lines = counts.failed + failed, totals.failed_lines + failed
        return msgspec.json.encode(self._stored)

    # The end.

    async def _finish(self) -> None:
        """Writes the result files. Repeatable: a crash before its last commit changes nothing."""
        stored, batch, files = self._stored, self._batch, self._parts.files
        progress = await self._parts.state.progress(batch.id)
        for is_error, file_id in ((False, stored.output_id), (True, stored.error_id)):
            size = await join_parts(files.blobs, progress, is_error, file_id)
            if not size:
                continue
            created = batch.cancelling_at or batch.finalizing_at or batch.created_at
            what = "error" if is_error else "output"
            file = FileObject(
                id=file_id,
                bytes=size,
                created_at=created,
                expires_at=created + stored.output_seconds,
                filename=f"{batch.id}_{what}.jsonl",
                purpose="batch_output",
            )
            await files.register(stored.tenant, file)
            setattr(batch, f"{what}_file_id", file_id)
        batch.status = stored.outcome
        setattr(batch, f"{stored.outcome}_at", _now())
        await self._commit()

    async def _clean_up(self) -> None:
        state, entry = self._parts.state, Entry(BATCH, self._stored.tenant, self._batch.id)
        await state.expire(entry, time.time() + KEPT_SECONDS)
        await self._parts.files.blobs.delete_below(batch_folder(entry.name))
        await state.close_batch(entry)

    async def _commit(self) -> None:
        record = msgspec.json.encode(self._stored)
        await self._parts.state.commit(self._batch.id, self._fence, Commit(record))

    async def _read(self, offset: int, length: int) -> bytes:
        return await self._parts.files.blobs.read(file_blob(self._batch.input_file_id), offset, length)


async def _flush_when_due(writer: PartWriter) -> None:
    while True:
        await asyncio.sleep(_FLUSH_POLL_SECONDS)
        if writer.due:
            await writer.flush()


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """Returns the first of the failures of nested task groups."""
    one: BaseException = group
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]
    assert isinstance(one, Exception)
    return one


def _now() -> int:
    return int(time.time())
