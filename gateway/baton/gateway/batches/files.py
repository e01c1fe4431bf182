"""Files by tenant: their records in the state store, their bytes in the blob store. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable

import msgspec

from baton.gateway.batches.blobs.threads import Blobs
from baton.gateway.batches.pages import PageQuery, read_page
from baton.gateway.batches.records import FILE, StoredFile, file_blob, file_of
from baton.gateway.batches.state.store import Entry, StateStore, StorageFull, Use
from baton.gateway.batches.types import FileObject
from baton.gateway.metrics.batches import BatchCounters
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError

# What OpenAI's clients may store. Only files for batches are used here.
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_EXPIRY_SECONDS = (3600, 30 * 86400)
_MAX_NAME = 255


def new_file_id() -> str:
    """Returns a new id."""
    return f"file-{uuid.uuid4().hex}"


class Files:
    """Creates, finds and deletes files. Raises NotFound, also for files of other tenants, and Unavailable.

    `max_tenant_bytes`: of all files of a tenant; 0: any number. Results of batches count, and are never refused.
    """

    def __init__(self, state: StateStore, blobs: Blobs, max_tenant_bytes: int, counters: BatchCounters) -> None:
        self._state = state
        self._max_tenant_bytes = max_tenant_bytes
        self._counters = counters
        self.blobs = blobs
        self._undoing: set[asyncio.Task[None]] = set()

    async def create(
        self, tenant: str, filename: str, purpose: str, size: int, pieces: Iterable[bytes], expires_after: int | None
    ) -> FileObject:
        """Stores a file of `size` bytes: nothing of it stays if that fails, or the caller is cancelled.

        `pieces` are made on another thread. Raises InvalidRequest if it does not fit into the tenant's storage.
        """
        stored = await self._state.stored_bytes(tenant) if self._max_tenant_bytes else 0
        if self._max_tenant_bytes and stored + size > self._max_tenant_bytes:
            raise self._too_much(size, stored)
        now = int(time.time())
        file = FileObject(
            id=new_file_id(),
            bytes=size,
            created_at=now,
            filename=filename[:_MAX_NAME],
            purpose=purpose,
            expires_at=None if expires_after is None else now + expires_after,
        )
        work = asyncio.create_task(self._store(tenant, file, pieces))
        try:
            await asyncio.shield(work)
        except BaseException:
            undo = asyncio.create_task(self._undo(work, Entry(FILE, tenant, file.id)))
            self._undoing.add(undo)
            undo.add_done_callback(self._undoing.discard)
            raise
        self._counters.uploaded_bytes += size
        return file

    async def close(self) -> None:
        """Waits until nothing of failed uploads stays, then ends the threads."""
        if self._undoing:
            await asyncio.wait(self._undoing)
        self.blobs.close()

    async def _store(self, tenant: str, file: FileObject, pieces: Iterable[bytes]) -> None:
        await self.blobs.put(file_blob(file.id), pieces)
        try:
            await self._register(tenant, file, self._max_tenant_bytes)
        except StorageFull as full:  # by an upload at the same time
            raise self._too_much(file.bytes, full.stored) from full

    async def _undo(self, work: asyncio.Task[None], entry: Entry) -> None:
        await asyncio.wait((work,))
        with contextlib.suppress(ServiceError):
            await self._state.delete(entry)
        with contextlib.suppress(ServiceError):
            await self.blobs.delete(file_blob(entry.name))

    async def register(self, tenant: str, file: FileObject) -> None:
        """Stores the record of a batch's result file, whose bytes are stored. Idempotent."""
        await self._register(tenant, file, 0)
        self._counters.result_bytes += file.bytes

    async def _register(self, tenant: str, file: FileObject, limit: int) -> None:
        record = msgspec.json.encode(StoredFile(tenant=tenant, file=file))
        entry, use = Entry(FILE, tenant, file.id), Use(file.bytes, limit)
        await self._state.create_file(entry, record, file.created_at, file.expires_at, use)

    def _too_much(self, size: int, stored: int) -> InvalidRequest:
        return InvalidRequest(
            f"file has {size} bytes, and your other files have {stored}; together they may have "
            f"{self._max_tenant_bytes}: delete some",
            field="file",
        )

    async def get(self, tenant: str, file_id: str, field: str = "file_id") -> FileObject:
        """Returns a file of the tenant. Raises NotFound, also for files of other tenants and expired ones."""
        (record,) = await self._state.load(FILE, [file_id])
        found = None if record is None else _live(file_of(record), tenant)
        if found is None:
            raise NotFound(f"No such File object: {file_id[:80]}", field=field)
        return found

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file of the tenant, with its bytes. Raises NotFound."""
        await self.get(tenant, file_id)
        await self._state.delete(Entry(FILE, tenant, file_id))
        await self.blobs.delete(file_blob(file_id))

    async def page(self, tenant: str, query: PageQuery) -> tuple[list[FileObject], bool]:
        """Returns a page of the tenant's files, and whether more follow. Raises InvalidRequest."""

        def decode(record: bytes) -> FileObject | None:
            file = _live(file_of(record), tenant)
            return file if file is not None and query.purpose in ("", file.purpose) else None

        return await read_page(self._state, FILE, tenant, query, decode)


def check_purpose(purpose: str | None) -> str:
    """Returns the purpose. Raises InvalidRequest."""
    if purpose is None:
        raise InvalidRequest("purpose is required; give batch for the input of a batch", field="purpose")
    if purpose not in PURPOSES:
        raise InvalidRequest(f"purpose is {purpose[:40]!r}; give one of {', '.join(PURPOSES)}", field="purpose")
    return purpose


def check_expiry(seconds: int, field: str) -> int:
    """Returns the seconds until a file expires. Raises InvalidRequest."""
    least, most = _EXPIRY_SECONDS
    if not least <= seconds <= most:
        raise InvalidRequest(f"{field} is {seconds}; it must be from {least} to {most}", field=field)
    return seconds


def _live(stored: StoredFile, tenant: str) -> FileObject | None:
    expires_at = stored.file.expires_at
    is_live = expires_at is None or expires_at > time.time()
    return stored.file if stored.tenant == tenant and is_live else None
