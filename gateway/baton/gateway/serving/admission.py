"""How many generations run at once, and that no two of them have one name."""

from __future__ import annotations

import uuid

from baton.rpc.errors import InvalidRequest, NoCapacity, Unavailable
from baton.v1 import types_pb2

_RETRY_AFTER_MS = 1000


class Admission:
    """A bounded number of places, each under a request id."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._request_ids: set[str] = set()
        self.taken = 0
        self.draining = False

    def admit(self, request_id: str, places: int) -> Ticket:
        """Takes places. Raises NoCapacity where there are too few, InvalidRequest where there never can be enough."""
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_ms=_RETRY_AFTER_MS)
        if places > self._most:
            raise InvalidRequest(
                f"n choices of every prompt are {places} generations; this gateway runs at most {self._most} at once",
                field="n",
            )
        if self.taken + places > self._most:
            raise NoCapacity(
                f"{self.taken} generations run on this gateway, and at most {self._most} may; retry later",
                phase=types_pb2.PHASE_REQUEST,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        # Clients that retry send one id twice; workers know a request by its id.
        unique = request_id if request_id not in self._request_ids else f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._request_ids.add(unique)
        self.taken += places
        return Ticket(self, unique, places)

    def drain(self) -> None:
        """Admits nothing more."""
        self.draining = True

    def give_back(self, ticket: Ticket) -> None:
        """The generation has ended."""
        self._request_ids.discard(ticket.request_id)
        self.taken -= ticket.places


class Ticket:
    """Places that a request holds until `end`."""

    __slots__ = ("_admission", "places", "request_id")

    def __init__(self, admission: Admission, request_id: str, places: int) -> None:
        self._admission: Admission | None = admission
        self.request_id = request_id  # unique among the running ones
        self.places = places

    def end(self) -> None:
        """Gives the places back. Idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.give_back(self)
