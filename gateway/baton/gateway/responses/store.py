"""All responses of this gateway: running ones and stored ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from baton.gateway.responses.items import Item
from baton.gateway.responses.running import RunningResponse
from baton.gateway.responses.types import ResponseError, StoredResponse
from baton.gateway.storage.store import ALIVE_SECONDS, RecordStore
from baton.rpc.errors import NotFound, ServiceError, Unavailable

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.2


class ResponseStore:
    """Responses by id. `close` gives running ones time to end."""

    def __init__(self, records: RecordStore) -> None:
        self.records = records
        self._decoder = msgspec.json.Decoder(StoredResponse)
        self._background: dict[str, RunningResponse] = {}
        self._idle = asyncio.Event()  # set while nothing runs in the background
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task that outlives its caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def running(self, response_id: str) -> RunningResponse | None:
        """Returns a background response that runs on this gateway."""
        return self._background.get(response_id)

    async def begin(self, running: RunningResponse, items: Sequence[Item], context: Sequence[Item]) -> None:
        """Registers and stores a background response when it starts. Raises Unavailable."""
        response_id = running.response.id
        await self._beat([response_id])
        await self._save(
            StoredResponse(
                response=running.response,
                input=list(items),
                context=list(context),
                tenant=running.tenant,
                session=running.session,
            )
        )
        self._background[response_id] = running
        self._idle.clear()
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating())

    async def keep(
        self, running: RunningResponse, items: Sequence[Item], context: Sequence[Item], with_events: bool
    ) -> None:
        """Stores a response that has ended. Only logs a failure."""
        events = [event.decode() for event in running.events] if with_events else None
        stored = StoredResponse(
            response=running.response,
            input=list(items),
            context=list(context),
            events=events,
            tenant=running.tenant,
            session=running.session,
        )
        try:
            await self._save(stored)
        except ServiceError as error:
            _log.warning("cannot store response %s: %s", running.response.id, error.message)
        finally:
            self._drop(running.response.id)

    async def get(self, response_id: str, field: str) -> StoredResponse:
        """Returns the current state of a response.

        Raises NotFound, Unavailable. `field` is the request's field with the id.
        """
        stored = await self._load(response_id)
        if stored is None:
            raise NotFound(f"Response with id '{response_id}' not found.", field=field)
        running = self._background.get(response_id)
        response = stored.response
        if running is not None:
            stored.response = running.response
        elif response.status in ("queued", "in_progress") and not await self.records.is_running(response_id):
            # It may have been stored since it was loaded.
            stored = await self._load(response_id) or stored
            if stored.response.status in ("queued", "in_progress"):
                stored.response.status = "failed"
                stored.response.error = ResponseError("server_error", "The gateway that ran this response has stopped.")
        return stored

    async def delete(self, response_id: str) -> None:
        """Deletes a response and ends it if it runs here. Raises NotFound, Unavailable."""
        running = self._drop(response_id)
        if running is not None:
            running.abandon()
        if not await self.records.delete(response_id):
            raise NotFound(f"Response with id '{response_id}' not found.", field="response_id")

    async def cancel(self, response_id: str) -> StoredResponse:
        """Cancels a background response on this or another gateway. Raises NotFound, Unavailable."""
        stored = await self.get(response_id, "response_id")
        running = self._background.get(response_id)
        if running is not None:
            running.cancel()
        elif stored.response.status in ("queued", "in_progress"):
            await self.records.ask_cancel(response_id)
            return await self._until_ended(response_id)
        return stored

    async def close(self, timeout: float) -> None:
        """Waits for running responses, ends the rest after `timeout`, and closes the store."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        for running in list(self._background.values()):
            running.fail(Unavailable("the gateway is shutting down"))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_BEAT_SECONDS * 2)
        if self._beating is not None:
            self._beating.cancel()
        await self.records.close()

    def _drop(self, response_id: str) -> RunningResponse | None:
        running = self._background.pop(response_id, None)
        if not self._background:
            self._idle.set()
        return running

    async def _until_ended(self, response_id: str) -> StoredResponse:
        for _ in range(int(ALIVE_SECONDS / _POLL_SECONDS)):
            await asyncio.sleep(_POLL_SECONDS)
            stored = await self.get(response_id, "response_id")
            if stored.response.status not in ("queued", "in_progress"):
                return stored
        raise Unavailable("the gateway that runs this response does not answer", retry_after_ms=1000)

    async def _save(self, stored: StoredResponse) -> None:
        await self.records.save(stored.response.id, msgspec.json.encode(stored))

    async def _load(self, response_id: str) -> StoredResponse | None:
        record = await self.records.load(response_id)
        if record is None:
            return None
        try:
            return self._decoder.decode(record)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            _log.warning("cannot decode the record of response %s: %s", response_id, error)
            return None

    async def _keep_beating(self) -> None:
        try:
            while self._background:
                await asyncio.sleep(_BEAT_SECONDS)
                with contextlib.suppress(ServiceError):
                    await self._beat(list(self._background))
        finally:
            self._beating = None

    async def _beat(self, response_ids: Sequence[str]) -> None:
        for response_id in await self.records.beat(response_ids):
            running = self._background.get(response_id)
            if running is not None:
                running.cancel()
