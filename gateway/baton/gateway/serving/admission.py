"""Limits the number of concurrent generations, and makes their request ids unique."""

from __future__ import annotations

import uuid

from baton.rpc.errors import InvalidRequest, NoCapacity, Unavailable
from baton.v1 import types_pb2

_RETRY_AFTER_MS = 1000


class Admission:
    """A limit of concurrent generations. Each admitted request has a unique id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._request_ids: set[str] = set()
        self.taken = 0
        self.draining = False

    def admit(self, request_id: str, places: int) -> Ticket:
        """Admits a request. Raises NoCapacity if the limit is reached, InvalidRequest if the request alone
        exceeds it.
        """
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_ms=_RETRY_AFTER_MS)
        if places > self._most:
            raise InvalidRequest(
                f"the request has {places} generations (n per prompt); at most {self._most} are allowed at once",
                field="n",
            )
        if self.taken + places > self._most:
            raise NoCapacity(
                f"the gateway runs {self.taken} of at most {self._most} generations; retry later",
                phase=types_pb2.PHASE_REQUEST,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        # A retry may reuse the id of a running request, and workers identify requests by id.
        unique = request_id if request_id not in self._request_ids else f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._request_ids.add(unique)
        self.taken += places
        return Ticket(self, unique, places)

    def drain(self) -> None:
        """Refuses all further requests."""
        self.draining = True

    def give_back(self, ticket: Ticket) -> None:
        """Releases the capacity of a request that has ended."""
        self._request_ids.discard(ticket.request_id)
        self.taken -= ticket.places


class Ticket:
    """The admitted generations of a request, held until `end`."""

    __slots__ = ("_admission", "places", "request_id")

    def __init__(self, admission: Admission, request_id: str, places: int) -> None:
        self._admission: Admission | None = admission
        self.request_id = request_id  # unique among the running requests
        self.places = places

    def end(self) -> None:
        """Releases the capacity. Idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.give_back(self)
