"""The interface that generations use to find workers. Knows no router."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement, and when it was requested and made."""

    response: router_pb2.PlaceResponse
    at: float  # monotonic seconds
    asked_at: float  # monotonic seconds of the first attempt


class Placer(Protocol):
    """Places requests on workers."""

    async def place(self, request: router_pb2.PlaceRequest, avoided: Collection[str] = ()) -> Placed:
        """Returns a placement. Raises a ServiceError if there is none.

        `avoided` workers are excluded as long as there are others.
        """

    def report(self, placed: Placed, outcome: router_pb2.PlacementOutcome, longest: int = 0) -> None:
        """Takes a placement's outcome. `longest`: output tokens of its longest choice."""
