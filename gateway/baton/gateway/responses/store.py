"""All responses of this gateway: those that run, and those that are kept."""

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
from baton.gateway.storage.store import ALIVE_SECONDS, ResponseStore
from baton.rpc.errors import NotFound, ServiceError, Unavailable

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.2


class ResponseShelf:
    """Responses by id. `close` gives the running ones time to end."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._decoder = msgspec.json.Decoder(StoredResponse)
        self._background: dict[str, RunningResponse] = {}
        self._idle = asyncio.Event()  # nothing runs in the background
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work that outlives its caller."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def running(self, response_id: str) -> RunningResponse | None:
        """The response that is being made here in the background."""
        return self._background.get(response_id)

    async def begin(self, running: RunningResponse, items: Sequence[Item], context: Sequence[Item]) -> None:
        """A response is made in the background: from now on it can be asked for. Raises Unavailable."""
        response_id = running.response.id
        await self._beat([response_id])
        await self._save(
            StoredResponse(response=running.response, input=list(items), context=list(context), tenant=running.tenant)
        )
        self._background[response_id] = running
        self._idle.clear()
        if self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._keep_beating())

    async def keep(
        self, running: RunningResponse, items: Sequence[Item], context: Sequence[Item], with_events: bool
    ) -> None:
        """The response has ended: keeps it. What cannot be kept is logged."""
        events = [event.decode() for event in running.events] if with_events else None
        stored = StoredResponse(
            response=running.response,
            input=list(items),
            context=list(context),
            events=events,
            tenant=running.tenant,
        )
        try:
            await self._save(stored)
        except ServiceError as error:
            _log.warning("response %s is not kept: %s", running.response.id, error.message)
        finally:
            self._drop(running.response.id)

    async def get(self, response_id: str, field: str) -> StoredResponse:
        """The response as it is now. Raises NotFound, Unavailable; `field` is the one that named it."""
        stored = await self._load(response_id)
        if stored is None:
            raise NotFound(f"Response with id '{response_id}' not found.", field=field)
        running = self._background.get(response_id)
        response = stored.response
        if running is not None:
            stored.response = running.response
        elif response.status in ("queued", "in_progress") and not await self.store.is_running(response_id):
            # It may have been kept since it was loaded.
            stored = await self._load(response_id) or stored
            if stored.response.status in ("queued", "in_progress"):
                stored.response.status = "failed"
                stored.response.error = ResponseError("server_error", "The gateway that made this response is gone.")
        return stored

    async def delete(self, response_id: str) -> None:
        """Forgets a response; ends it where it runs. Raises NotFound, Unavailable."""
        running = self._drop(response_id)
        if running is not None:
            running.abandon()
        if not await self.store.delete(response_id):
            raise NotFound(f"Response with id '{response_id}' not found.", field="response_id")

    async def cancel(self, response_id: str) -> StoredResponse:
        """Ends a response that is made in the background, here or elsewhere. Raises NotFound, Unavailable."""
        stored = await self.get(response_id, "response_id")
        running = self._background.get(response_id)
        if running is not None:
            running.cancel()
        elif stored.response.status in ("queued", "in_progress"):
            await self.store.ask_cancel(response_id)
            return await self._until_ended(response_id)
        return stored

    async def close(self, timeout: float) -> None:
        """Waits for what runs, ends what still does then, and closes the store."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        for running in list(self._background.values()):
            running.fail(Unavailable("the gateway is shutting down"))
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_BEAT_SECONDS * 2)
        if self._beating is not None:
            self._beating.cancel()
        await self.store.close()

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
        raise Unavailable("the gateway that makes this response does not answer", retry_after_ms=1000)

    async def _save(self, stored: StoredResponse) -> None:
        await self.store.save(stored.response.id, msgspec.json.encode(stored))

    async def _load(self, response_id: str) -> StoredResponse | None:
        record = await self.store.load(response_id)
        if record is None:
            return None
        try:
            return self._decoder.decode(record)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            _log.warning("the record of response %s is of another version: %s", response_id, error)
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
        for response_id in await self.store.beat(response_ids):
            running = self._background.get(response_id)
            if running is not None:
                running.cancel()
