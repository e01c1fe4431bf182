"""News between routers: placements, their ends, lost workers, cordons. Owns no connection and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.router.fleet.fleet import Cordon, Fleet
from baton.router.requests.in_flight import OWN, InFlight, Placed, Share
from baton.router.requests.prompt_sketch import Sketch
from baton.v1 import router_pb2

_SKETCH_HASHES = 64  # sent with each prompt
_MAX_WAITING = 20_000  # messages for one reader; one that lags more must restart
_SNAPSHOT_PART = 500  # placements or ends in one message


@dataclass(slots=True, eq=False)
class Reader:
    """One other router, and what waits for it."""

    wake: Callable[[], None]
    placements: list[tuple[router_pb2.SharedPlacement, float]] = field(default_factory=list)  # and when they were made
    ends: list[int] = field(default_factory=list)
    cordons: list[Cordon] = field(default_factory=list)
    suspicions: list[tuple[str, int]] = field(default_factory=list)  # worker id and epoch
    lags: bool = False

    @property
    def has_news(self) -> bool:
        """Whether news are queued."""
        return bool(self.placements or self.ends or self.cordons or self.suspicions)


class PeerNews:
    """Collects news for every reader. A PlacerListener and a CordonListener."""

    def __init__(self, router_id: int, in_flight: InFlight, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.router_id = router_id
        self._in_flight = in_flight
        self._fleet = fleet
        self._clock = clock
        self._readers: list[Reader] = []

    def join(self, wake: Callable[[], None]) -> Reader:
        """Adds a reader. It receives all later news, and `wake` is called at each."""
        reader = Reader(wake)
        self._readers.append(reader)
        return reader

    def leave(self, reader: Reader) -> None:
        """Removes a reader."""
        self._readers.remove(reader)

    def snapshot(self) -> Iterator[router_pb2.ShareResponse]:
        """Returns the present state in parts, from all routers.

        Includes the last ends: a reader that was disconnected still counts placements whose ends it missed.
        """
        now = self._clock()
        known = list(self._in_flight.all())
        for start in range(0, len(known), _SNAPSHOT_PART):
            part = router_pb2.ShareResponse(router_id=self.router_id)
            for placed, at in known[start : start + _SNAPSHOT_PART]:
                message = self._message(placed)
                message.age_ms = _age_ms(at, now)
                part.placements.append(message)
            yield part
        ended = list(self._in_flight.ended())
        for start in range(0, len(ended), _SNAPSHOT_PART):
            ends = map(_end_message, ended[start : start + _SNAPSHOT_PART])
            yield router_pb2.ShareResponse(router_id=self.router_id, ends=ends)
        cordons = [_cordon_message(one) for one in self._fleet.cordons()]
        yield router_pb2.ShareResponse(router_id=self.router_id, cordons=cordons, complete=True)

    def take(self, reader: Reader) -> router_pb2.ShareResponse:
        """Returns the reader's queued news, empty ones too, which prove that this router is alive."""
        now = self._clock()
        response = router_pb2.ShareResponse(
            router_id=self.router_id,
            ends=map(_end_message, reader.ends),
            cordons=map(_cordon_message, reader.cordons),
            suspicions=[router_pb2.SharedSuspicion(worker_id=one, epoch=epoch) for one, epoch in reader.suspicions],
        )
        for message, at in reader.placements:
            response.placements.append(message)
            response.placements[-1].age_ms = _age_ms(at, now)
        reader.placements, reader.ends, reader.cordons, reader.suspicions = [], [], [], []
        return response

    def on_placed(self, placed: Placed) -> None:
        """Queues a placement of this router."""
        if self._readers:
            entry = self._message(placed), self._clock()
            for reader in self._readers:
                reader.placements.append(entry)
                self._notify(reader)

    def on_ended(self, placement_id: int) -> None:
        """Queues the end of a placement that was reported to this router."""
        for reader in self._readers:
            reader.ends.append(placement_id)
            self._notify(reader)

    def on_suspected(self, worker_id: str, epoch: int) -> None:
        """Queues a worker that a gateway reported as lost."""
        for reader in self._readers:
            reader.suspicions.append((worker_id, epoch))
            self._notify(reader)

    def on_cordon(self, cordon: Cordon) -> None:
        """Queues a cordon or its end."""
        for reader in self._readers:
            reader.cordons.append(cordon)
            self._notify(reader)

    def _notify(self, reader: Reader) -> None:
        reader.lags = len(reader.placements) + len(reader.ends) > _MAX_WAITING
        reader.wake()

    def _message(self, placed: Placed) -> router_pb2.SharedPlacement:
        sketch = placed.sketch.thinned(_SKETCH_HASHES)
        return router_pb2.SharedPlacement(
            placement_id=placed.placement_id,
            shares=[
                router_pb2.SharedShare(
                    worker_id=share.worker_id,
                    num_requests=share.num_requests,
                    num_prefill_tokens=share.num_prefill_tokens,
                    num_blocks=share.num_blocks,
                )
                for share in placed.shares
            ],
            block_counts=sketch.counts,
            block_hashes=sketch.hashes,
            tenant=placed.tenant,
            tenant_weight=placed.weight,
            num_tokens=placed.num_tokens,
            priority=placed.priority,
            router_id=self.router_id if placed.origin == OWN else placed.origin,
        )


def placed_of(message: router_pb2.SharedPlacement) -> Placed:
    """Applies another router's news."""
    return Placed(
        message.placement_id,
        tuple(
            Share(share.worker_id, share.num_requests, share.num_prefill_tokens, share.num_blocks)
            for share in message.shares
        ),
        Sketch(tuple(message.block_counts), message.block_hashes),
        message.tenant,
        message.tenant_weight,
        message.num_tokens,
        message.priority,
        message.router_id,
    )


def _end_message(placement_id: int) -> router_pb2.SharedEnd:
    return router_pb2.SharedEnd(placement_id=placement_id)


def _cordon_message(cordon: Cordon) -> router_pb2.SharedCordon:
    return router_pb2.SharedCordon(worker_id=cordon.worker_id, cordoned=cordon.cordoned, stamp_us=cordon.stamp_us)


def _age_ms(at: float, now: float) -> int:
    return max(0, round((now - at) * 1000))
