"""Creates, finds, lists and cancels batches. Runs nothing, and knows nothing of HTTP."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection

import msgspec

from baton.gateway.batches.files import Files, check_expiry
from baton.gateway.batches.pages import PageQuery, read_page
from baton.gateway.batches.records import BATCH, KEPT_SECONDS, StoredBatch, batch_of
from baton.gateway.batches.state.store import Entry, StateStore
from baton.gateway.batches.types import BatchObject, CreateBatch
from baton.gateway.fields.validation import check_metadata
from baton.rpc.errors import InvalidRequest, NotFound

# Every POST route that may be the target of a batch; a gateway refuses those that it does not serve.
TARGETS_FOR_VECTORS = (
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/classify",
    "/pooling",
)
TARGETS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/moderations",
    "/v1/images/generations",
    "/v1/images/edits",
    *TARGETS_FOR_VECTORS,
)
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_SECONDS = 30 * 86400
_CANCELLABLE = ("validating", "in_progress", "finalizing", "cancelling")


class Batches:
    """The operations on batches. `on_created` is called when one is to be run. Raises ServiceError."""

    def __init__(
        self, state: StateStore, files: Files, targets: Collection[str], on_created: Callable[[], None]
    ) -> None:
        self._state = state
        self._files = files
        self._targets = targets
        self._on_created = on_created

    async def create(self, tenant: str, request: CreateBatch) -> BatchObject:
        """Creates a batch, which is validated and run later."""
        self._check_target(request.endpoint)
        window = window_seconds(request.completion_window)
        check_metadata(request.metadata)
        after = request.output_expires_after
        kept = KEPT_SECONDS if after is None else check_expiry(after.seconds, "output_expires_after.seconds")
        file = await self._files.get(tenant, request.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest(
                f"input_file_id: the file {file.id} has the purpose {file.purpose!r}; upload it with batch",
                field="input_file_id",
            )
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + window,
            metadata=request.metadata,
        )
        record = msgspec.json.encode(StoredBatch(tenant=tenant, batch=batch, output_seconds=kept))
        await self._state.create(Entry(BATCH, tenant, batch.id), record, time.time(), None)
        self._on_created()
        return batch

    async def get(self, tenant: str, batch_id: str) -> BatchObject:
        """Returns a batch."""
        (record,) = await self._state.load(BATCH, [batch_id])
        stored = None if record is None else batch_of(record)
        if stored is None or stored.tenant != tenant:
            raise NotFound(f"No batch found with id '{batch_id[:80]}'.", field="batch_id")
        return (await self._shown([stored.batch]))[0]

    async def cancel(self, tenant: str, batch_id: str) -> BatchObject:
        """Cancels a batch: no further line is started."""
        batch = await self.get(tenant, batch_id)
        if batch.status not in _CANCELLABLE:
            raise InvalidRequest(f"Cannot cancel a batch with status '{batch.status}'.", field="batch_id")
        await self._state.cancel(batch_id, time.time())
        self._on_created()
        return await self.get(tenant, batch_id)

    async def page(self, tenant: str, query: PageQuery) -> tuple[list[BatchObject], bool]:
        """Returns a page of the tenant's batches, and whether more follow."""

        def decode(record: bytes) -> BatchObject | None:
            stored = batch_of(record)
            return stored.batch if stored.tenant == tenant else None

        batches, has_more = await read_page(self._state, BATCH, tenant, query, decode)
        return await self._shown(batches), has_more

    async def _shown(self, batches: list[BatchObject]) -> list[BatchObject]:
        """Returns batches as clients see them: one that is asked to cancel is cancelling, though its holder runs it."""
        times = await self._state.cancelled_at([batch.id for batch in batches])
        for batch, cancelled in zip(batches, times, strict=True):
            if cancelled is not None and batch.status in _CANCELLABLE:
                batch.status, batch.cancelling_at = "cancelling", int(cancelled)
        return batches

    def _check_target(self, endpoint: str) -> None:
        if endpoint in self._targets:
            return
        served = ", ".join(self._targets)
        known = "is not served by this gateway" if endpoint in TARGETS else "cannot be the target of a batch"
        raise InvalidRequest(f"endpoint {endpoint[:80]!r} {known}; give one of {served}", field="endpoint")


def window_seconds(text: str) -> int:
    """Returns the seconds of a completion window. Raises InvalidRequest."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MAX_WINDOW_SECONDS:
        raise InvalidRequest(
            f"completion_window is {text[:40]!r}; give 24h, or another time up to 30d, such as 90m or 7d",
            field="completion_window",
        )
    return seconds
