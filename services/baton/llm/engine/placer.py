"""Places every request on the one engine of this process. Implements the gateway's Placer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from baton.gateway.routers.placer import Placed
from baton.rpc.errors import ServiceError, Unavailable
from baton.v1 import router_pb2, types_pb2


class LocalPlacer:
    """`end_of_engine` returns why the engine has ended, or None. Outcomes go to `on_outcome`."""

    def __init__(
        self,
        endpoint: types_pb2.Endpoint,
        end_of_engine: Callable[[], ServiceError | None],
        on_outcome: Callable[[router_pb2.PlacementOutcome, int], None],
    ) -> None:
        self._worker_id = endpoint.worker_id
        self._response = router_pb2.PlaceResponse(placement_id=1, decode=endpoint)
        self._end_of_engine = end_of_engine
        self._on_outcome = on_outcome

    async def place(self, request: router_pb2.PlaceRequest, avoided: Collection[str] = ()) -> Placed:
        """Returns the engine. Raises Unavailable if it has refused the request or has ended."""
        return self.fixed(request.excluded_worker_ids)

    def fixed(self, excluded: Collection[str]) -> Placed:
        """Returns the engine, without a request. Raises Unavailable if it is excluded or has ended."""
        end = self._end_of_engine()
        if end is not None:
            raise Unavailable(f"the engine has ended: {end.message}") from end
        if excluded and self._worker_id in excluded:
            raise Unavailable("the engine ended the request, or takes no requests now: it is asleep, paused or closed")
        now = time.monotonic()
        return Placed(self._response, now, now)

    def report(self, placed: Placed, outcome: router_pb2.PlacementOutcome, longest: int = 0) -> None:
        self._on_outcome(outcome, longest)
