"""The running requests of each tenant by id, so that another request of the same tenant can end them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.core import Generation
from baton.rpc.errors import InvalidRequest

MOST_IDS = 1024  # of one call
# What answers write before a request's id.
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


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
    """One generation of a request."""

    __slots__ = ("_cancelled", "_generation", "_registry", "keys")

    def __init__(self, registry: RunningRequests, keys: list[tuple[str, str]]) -> None:
        self._registry = registry
        self._generation: Generation | None = None
        self._cancelled = False
        self.keys = keys

    def started(self, generation: Generation) -> None:
        """Takes the generation after it was placed. Ends it if it was cancelled before."""
        self._generation = generation
        if self._cancelled:
            generation.cancel()

    def cancel(self) -> bool:
        """Ends the generation. Returns False if that was done before."""
        if self._cancelled:
            return False
        self._cancelled = True
        if self._generation is not None:
            self._generation.cancel()
        return True

    def end(self) -> None:
        """Forgets the generation after its end. Idempotent."""
        self._registry.remove(self)
