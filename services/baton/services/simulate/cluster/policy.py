"""The interface of a placement policy in the simulation, and the real placer behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.router.fleet.fleet import Fleet
from baton.router.index.prefix_index import PrefixIndex
from baton.router.placement.placer import Placer
from baton.router.placement.worker_snapshot import Objectives
from baton.v1 import router_pb2


class Policy(Protocol):
    """A placement policy. The fleet and the index that it reads are kept up to date for it."""

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        """Returns the workers for a request. Raises a ServiceError to refuse it."""

    def first_token(self, placement_id: int) -> None:
        """Called at a request's first token."""

    def report(self, outcome: router_pb2.PlacementOutcome) -> None:
        """Called at a request's end."""


@dataclass(frozen=True, slots=True)
class RouterParts:
    """The parts that a policy is made from."""

    fleet: Fleet
    index: PrefixIndex
    clock: Callable[[], float]
    seed: int
    max_queue_depth: int


PolicyFactory = Callable[[RouterParts], Policy]


class BatonPolicy:
    """The placer that `baton router` runs."""

    objectives = Objectives()

    def __init__(self, parts: RouterParts) -> None:
        self.placer = Placer(
            parts.fleet,
            parts.index,
            parts.max_queue_depth,
            explain_capacity=4096,
            clock=parts.clock,
            first_placement_id=1,  # it rotates ties by them
            objectives=self.objectives,
        )

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        return self.placer.place(request)

    def first_token(self, placement_id: int) -> None:
        """Does nothing: the real router is not notified of first tokens."""

    def report(self, outcome: router_pb2.PlacementOutcome) -> None:
        self.placer.report(outcome)


class AdapterBlindPolicy(BatonPolicy):
    """The same without regard to which worker has a request's adapter."""

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        blind = router_pb2.PlaceRequest()
        blind.CopyFrom(request)
        blind.ClearField("adapter")
        return super().place(blind)


class SheddingPolicy(BatonPolicy):
    """The same with `--shed`: it refuses what would spoil more streams than it adds."""

    objectives = Objectives(sheds=True)
