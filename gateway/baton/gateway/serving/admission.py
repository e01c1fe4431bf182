"""Limits the number of concurrent generations, and makes their request ids unique."""

from __future__ import annotations

import uuid

from baton.rpc.errors import InvalidRequest, NoCapacity, Unavailable
from baton.v1 import types_pb2

_RETRY_AFTER_MS = 1000


class ConcurrencyLimiter:
    """A limit of concurrent generations. Each admitted request has a unique id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._request_ids: set[str] = set()
        self.in_use = 0
        self.draining = False

    def admit(self, request_id: str, count: int) -> AdmittedRequest:
        """Admits a request.

        Raises NoCapacity if the limit is reached, InvalidRequest if the request alone exceeds it.
        """
        if self.draining:
            raise Unavailable("the gateway is shutting down", retry_after_ms=_RETRY_AFTER_MS)
        if count > self._limit:
            raise InvalidRequest(
                f"the request has {count} generations (n per prompt); at most {self._limit} are allowed at once",
                field="n",
            )
        if self.in_use + count > self._limit:
            raise NoCapacity(
                f"the gateway runs {self.in_use} of at most {self._limit} generations; retry later",
                phase=types_pb2.PHASE_REQUEST,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        # A retry may reuse the id of a running request, and workers identify requests by id.
        unique = request_id if request_id not in self._request_ids else f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._request_ids.add(unique)
        self.in_use += count
        return AdmittedRequest(self, unique, count)

    def drain(self) -> None:
        """Refuses all further requests."""
        self.draining = True

    def release(self, admitted: AdmittedRequest) -> None:
        """Releases the capacity of a request that has ended."""
        self._request_ids.discard(admitted.request_id)
        self.in_use -= admitted.count


class AdmittedRequest:
    """The admitted generations of a request, held until `end`."""

    __slots__ = ("_admission", "count", "request_id")

    def __init__(self, admission: ConcurrencyLimiter, request_id: str, count: int) -> None:
        self._admission: ConcurrencyLimiter | None = admission
        self.request_id = request_id  # unique among the running requests
        self.count = count

    def end(self) -> None:
        """Releases the capacity. Idempotent."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.release(self)
