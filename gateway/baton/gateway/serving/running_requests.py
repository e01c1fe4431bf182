"""The running requests of each tenant by id, so that another request of the same tenant can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from baton.rpc.errors import Cancelled, InvalidRequest

MOST_IDS = 1024  # of one call
# What answers write before a request's id.
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "embd-", "classify-", "pool-", "score-", "rerank-", "generative-scoring-")

T = TypeVar("T")


class Running(Protocol):
    """A generation, or a task."""

    def cancel(self) -> object:
        """Ends the request. Idempotent."""


class RunningRequests:
    """Requests by tenant and id. A request may have several generations, and several requests the same id."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], list[RunningRequest]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, tenant: str, *request_ids: str) -> RunningRequest:
        """Registers a generation of the request with these ids, until its `end`."""
        entry = RunningRequest(self, [(tenant, request_id) for request_id in request_ids if request_id])
        for key in entry.keys:
            self._entries.setdefault(key, []).append(entry)
        return entry

    async def run(self, work: Coroutine[Any, Any, T], tenant: str, request_id: str) -> T:
        """Returns the work's result. Raises Cancelled once another request of the tenant has ended it."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        entry = self.add(tenant, request_id)
        entry.started(task)
        try:
            return await work
        except asyncio.CancelledError:
            if entry.cancelled and not task.uncancel():
                message = f"the request {request_id} was ended by another request of its tenant"
                raise Cancelled(message, field="request_id") from None
            raise
        finally:
            entry.end()

    def remove(self, entry: RunningRequest) -> None:
        """Forgets a generation."""
        for key in entry.keys:
            left = [one for one in self._entries.get(key, ()) if one is not entry]
            if left:
                self._entries[key] = left
            else:
                self._entries.pop(key, None)

    def cancel(self, tenant: str, request_ids: Sequence[str]) -> int:
        """Ends the tenant's running requests with these ids; others are ignored. Returns how many were ended.

        An id may be as the client gave it, or as an answer names it. Raises InvalidRequest for too many ids.
        """
        if len(request_ids) > MOST_IDS:
            message = f"request_ids has {len(request_ids)} ids; at most {MOST_IDS} are allowed"
            raise InvalidRequest(message, field="request_ids")
        num_ended = 0
        for request_id in dict.fromkeys(request_ids):
            ended = [entry.cancel() for entry in self._find(tenant, request_id)]
            num_ended += any(ended)
        return num_ended

    def _find(self, tenant: str, request_id: str) -> list[RunningRequest]:
        names = (request_id, *(request_id.removeprefix(one) for one in _PREFIXES if request_id.startswith(one)))
        return next((list(self._entries[tenant, name]) for name in names if (tenant, name) in self._entries), [])


class RunningRequest:
    """One generation of a request, or all of its work."""

    __slots__ = ("_registry", "_running", "cancelled", "keys")

    def __init__(self, registry: RunningRequests, keys: list[tuple[str, str]]) -> None:
        self._registry = registry
        self._running: Running | None = None
        self.cancelled = False
        self.keys = keys

    def started(self, running: Running) -> None:
        """Takes the generation after it was placed. Ends it if it was cancelled before."""
        self._running = running
        if self.cancelled:
            running.cancel()

    def cancel(self) -> bool:
        """Ends the generation. Returns False if that was done before."""
        if self.cancelled:
            return False
        self.cancelled = True
        if self._running is not None:
            self._running.cancel()
        return True

    def end(self) -> None:
        """Forgets the generation after its end. Idempotent."""
        self._registry.remove(self)
        self._running = None
