"""Results of lines: collected into numbered parts that are committed with the lines' indices, then joined to files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from baton.gateway.batches.blobs.threads import Blobs
from baton.gateway.batches.records import StoredPart, batch_folder, file_blob, part_of
from baton.gateway.batches.running.line_call import LineAnswer
from baton.gateway.batches.running.lines import LineProblem
from baton.gateway.batches.state.store import AlreadyRecorded, Commit, Progress, StateStore
from baton.rpc.errors import Unavailable

_PART_BYTES = 4 << 20
_PART_LINES = 2000
_BEHIND = 4  # parts in memory, besides those that are being stored
_RETRY_SECONDS = 1.0
# A crash repeats the lines since the last part: no more than a hundredth of the batch's time, within these bounds.
_PART_SECONDS = (0.5, 30.0)
_PART_OF_TIME = 0.01


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line."""

    index: int
    data: bytes  # a line of a result file
    is_error: bool
    is_run: bool = True  # False: it was not run, and counts neither as completed nor as failed


def answered(index: int, custom_id: str, answer: LineAnswer) -> LineResult:
    """Returns the result of a line that was run."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body or b"null"),
    }
    document = {"id": f"batch_req_{answer.request_id}", "custom_id": custom_id, "response": response, "error": None}
    data = msgspec.json.encode(document)
    return LineResult(index, data + b"\n", answer.status != 200)


def not_run(index: int, custom_id: str | None, problem: LineProblem) -> LineResult:
    """Returns the result of a line that was not run."""
    document = {
        "id": f"batch_req_{index}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": problem.code, "message": problem.message},
    }
    return LineResult(index, msgspec.json.encode(document) + b"\n", True, is_run=False)


@dataclass(slots=True)
class _Pending:
    """Results that are not committed."""

    results: list[LineResult] = field(default_factory=list)
    num_bytes: int = 0


class PartWriter:
    """Commits results in parts. `record_with` returns the batch's record with what these results add to its counts.

    A part's blob is stored first; the commit, one step of the state store, makes it part of the batch. Blobs that were
    not committed are never read.
    """

    def __init__(
        self,
        state: StateStore,
        blobs: Blobs,
        batch_id: str,
        fence: int,
        record_with: Callable[[list[LineResult]], bytes],
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._blobs = blobs
        self._batch_id = batch_id
        self._fence = fence
        self._record_with = record_with
        self._clock = clock
        self._numbers = count(1)
        self._pending = _Pending()
        self._began = self._flushed = clock()
        self._flushing = asyncio.Lock()

    def add(self, result: LineResult) -> None:
        """Adds a result, which is committed by a later `flush`."""
        self._pending.results.append(result)
        self._pending.num_bytes += len(result.data)

    @property
    def is_full(self) -> bool:
        """Returns whether the results fill a part."""
        return self._pending.num_bytes >= _PART_BYTES or len(self._pending.results) >= _PART_LINES

    @property
    def is_behind(self) -> bool:
        """Returns whether no further line may start: the results in memory are not stored as fast as they come."""
        pending = self._pending
        return pending.num_bytes >= _BEHIND * _PART_BYTES or len(pending.results) >= _BEHIND * _PART_LINES

    @property
    def due(self) -> bool:
        """Returns whether the results should be committed now."""
        now = self._clock()
        if not self._pending.results:
            return False
        least, most = _PART_SECONDS
        wait = min(most, max(least, (now - self._began) * _PART_OF_TIME))
        return self.is_full or now - self._flushed >= wait

    async def flush(self) -> None:
        """Commits the results so far, even if the caller is cancelled meanwhile. Raises LeaseLost."""
        flush = asyncio.get_running_loop().create_task(self._flush())
        flush.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as retrieved
        await asyncio.shield(flush)

    async def _flush(self) -> None:
        async with self._flushing:
            pending, self._pending = self._pending, _Pending()
            self._flushed = self._clock()
            for first in range(0, len(pending.results), _PART_LINES):
                await self._commit(pending.results[first : first + _PART_LINES])

    async def _commit(self, results: list[LineResult]) -> None:
        number = next(self._numbers)
        parts = [
            part
            for is_error in (False, True)
            if (part := await self._store(number, is_error, [one for one in results if one.is_error is is_error]))
        ]
        encoded = [msgspec.json.encode(part) for part in parts]
        commit = Commit(self._record_with(results), [one.index for one in results], encoded)
        is_repeated = False
        while True:
            try:
                await self._state.commit(self._batch_id, self._fence, commit)
                return
            except Unavailable:
                is_repeated = True  # it may have been stored although the answer was lost
                await asyncio.sleep(_RETRY_SECONDS)
            except AlreadyRecorded:
                if is_repeated and encoded[0] in (await self._state.progress(self._batch_id)).parts:
                    return
                raise

    async def _store(self, number: int, is_error: bool, results: list[LineResult]) -> StoredPart | None:
        if not results:
            return None
        kind = "errors" if is_error else "results"
        name = f"{batch_folder(self._batch_id)}{self._fence:06d}-{number:06d}-{kind}"
        data = b"".join(one.data for one in results)
        while True:
            try:
                return StoredPart(name=name, size=await self._blobs.put(name, (data,)), is_error=is_error)
            except Unavailable:
                await asyncio.sleep(_RETRY_SECONDS)


async def join_parts(blobs: Blobs, progress: Progress, is_error: bool, file_id: str) -> int:
    """Stores the result file of all committed parts of a kind. Returns its size; 0: there are none. Repeatable."""
    parts = [part for record in progress.parts if (part := part_of(record)).is_error is is_error]
    if not parts:
        return 0
    return await blobs.join(file_blob(file_id), [(part.name, part.size) for part in parts])
