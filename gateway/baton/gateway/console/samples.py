"""Samples of the totals that routers report, and the changes between two of them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from baton.v1 import control_pb2, router_pb2

RATE_SECONDS = 5.0
PERCENTILE_SECONDS = 60.0
_SLACK = 0.5  # tolerance, as samples are about a second apart


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Totals of one worker since its start."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    flows: Mapping[str, tuple[int, int]]  # bytes and transfers by sender


@dataclass(frozen=True, slots=True)
class RouterTotals:
    """Totals of one router's placements since its start."""

    placed: int
    refused: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Sequence[int]  # counts by bucket
    itl: Sequence[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """All totals at one time."""

    at: float  # monotonic seconds
    workers: Mapping[str, WorkerTotals]
    routers: Mapping[int, RouterTotals]
    ttft_bounds: Sequence[float] = ()
    itl_bounds: Sequence[float] = ()


def sample_of(
    at: float, entries: Iterable[router_pb2.WorkerEntry], fleets: Sequence[router_pb2.GetFleetResponse]
) -> Sample:
    """Returns the totals in the routers' replies."""
    workers = {entry.state.worker_id: _worker(entry) for entry in entries if entry.alive}
    routers = {fleet.router_id: _router(fleet.totals) for fleet in fleets}
    ttft, itl = (fleets[0].totals.ttft_seconds, fleets[0].totals.itl_seconds) if fleets else (_EMPTY, _EMPTY)
    return Sample(at, workers, routers, list(ttft.bounds), list(itl.bounds))


_EMPTY = control_pb2.Histogram()


def _worker(entry: router_pb2.WorkerEntry) -> WorkerTotals:
    totals = entry.state.totals
    flows = {flow.sender_worker_id: (flow.num_bytes, flow.num_transfers) for flow in entry.state.flows}
    return WorkerTotals(totals.num_prompt_tokens, totals.num_cached_tokens, totals.num_output_tokens, flows)


def _router(totals: router_pb2.PlacementTotals) -> RouterTotals:
    return RouterTotals(
        totals.num_placed,
        totals.num_refused,
        totals.num_failed,
        totals.num_prompt_tokens,
        totals.num_cached_tokens,
        list(totals.ttft_seconds.counts),
        list(totals.itl_seconds.counts),
    )


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """The activity of one worker within some seconds."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    flows: Mapping[str, tuple[int, int]]  # bytes and transfers by sender, if any


@dataclass(frozen=True, slots=True)
class RouterChange:
    """The placements of all routers within some seconds."""

    seconds: float
    placed: int
    refused: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Sequence[int]
    itl: Sequence[int]


class Samples:
    """The recent samples: of workers for RATE_SECONDS, of routers for a minute.

    A total that falls has restarted from 0.
    """

    def __init__(self) -> None:
        self._workers: deque[tuple[float, Mapping[str, WorkerTotals]]] = deque()
        self._routers: deque[tuple[float, Mapping[int, RouterTotals]]] = deque()
        self.ttft_bounds: Sequence[float] = ()
        self.itl_bounds: Sequence[float] = ()

    def add(self, sample: Sample) -> None:
        """Adds the newest sample and drops those that are too old."""
        self.ttft_bounds, self.itl_bounds = sample.ttft_bounds, sample.itl_bounds
        self._workers.append((sample.at, sample.workers))
        self._routers.append((sample.at, sample.routers))
        while sample.at - self._workers[0][0] > RATE_SECONDS + _SLACK:
            self._workers.popleft()
        while sample.at - self._routers[0][0] > PERCENTILE_SECONDS + _SLACK:
            self._routers.popleft()

    def worker_changes(self) -> dict[str, WorkerChange]:
        """Returns the changes of the last RATE_SECONDS by worker id, except for workers with only one sample."""
        now, workers = self._workers[-1]
        changes = {}
        for worker_id, totals in workers.items():
            at, base = next((at, one[worker_id]) for at, one in self._workers if worker_id in one)
            if at < now:
                changes[worker_id] = _worker_change(now - at, base, totals)
        return changes

    def router_change(self, seconds: float) -> RouterChange | None:
        """Returns the change over all routers in the last `seconds`, or None with only one sample."""
        now, routers = self._routers[-1]
        recent = [(at, one) for at, one in self._routers if now - at <= seconds + _SLACK]
        if len(recent) == 1:
            return None
        numbers = [0] * 5
        ttft: list[int] = []
        itl: list[int] = []
        for router_id, totals in routers.items():
            base = next(one[router_id] for _, one in recent if router_id in one)
            for at, change in enumerate(map(_grown, _numbers(base), _numbers(totals))):
                numbers[at] += change
            ttft = _summed(ttft, _differences(base.ttft, totals.ttft))
            itl = _summed(itl, _differences(base.itl, totals.itl))
        placed, refused, failed, prompt_tokens, cached_tokens = numbers
        span = now - recent[0][0]
        return RouterChange(span, placed, refused, failed, prompt_tokens, cached_tokens, ttft, itl)


def _worker_change(seconds: float, base: WorkerTotals, now: WorkerTotals) -> WorkerChange:
    flows = {}
    for sender, (num_bytes, num_transfers) in now.flows.items():
        base_bytes, base_transfers = base.flows.get(sender, (0, 0))
        if num_bytes != base_bytes:
            flows[sender] = _grown(base_bytes, num_bytes), _grown(base_transfers, num_transfers)
    return WorkerChange(
        seconds,
        _grown(base.prompt_tokens, now.prompt_tokens),
        _grown(base.cached_tokens, now.cached_tokens),
        _grown(base.output_tokens, now.output_tokens),
        flows,
    )


def _numbers(totals: RouterTotals) -> tuple[int, ...]:
    return totals.placed, totals.refused, totals.failed, totals.prompt_tokens, totals.cached_tokens


def _grown(before: int, now: int) -> int:
    return now - before if now >= before else now


def _differences(before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [_grown(was, count) for was, count in zip_longest(before, now, fillvalue=0)]


def _summed(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
