"""The client of the routers: placements with retries over replicas, background reports of outcomes, served models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.routers.link import NotPlaced, RouterLink
from baton.gateway.routers.placer import Placed
from baton.rpc.channel import Dial
from baton.rpc.errors import NotFound, ServiceError, Unavailable, error_from_rpc, problem_of
from baton.v1 import router_pb2, types_pb2

_log = logging.getLogger(__name__)

# Errors that another router, or a later attempt, may not return.
_TRANSIENT = frozenset(
    (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.NOT_FOUND,
    )
)
_RETRY_AFTER_MS = 1000
_MAX_REPORTS = 4096  # queued for one router
_REPORT_PAUSE_SECONDS = 0.25  # after a failed report
_REPORT_BATCH = 256
_FEW_REPORTS = 16  # fewer wait longer for more, as a call costs a lone request more than its placement
_PLAIN = Dial()


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """Timeouts and delays in seconds."""

    attempt: float = 1.0  # for one router's reply
    total: float = 5.0  # for all attempts, while no router is reachable
    # For all attempts, while routers reply that no worker is alive: longer than a router needs to detect a returning
    # one.
    no_worker: float = 2.0
    first_delay: float = 0.05
    max_delay: float = 1.0
    report_interval: float = 0.05
    few_reports_interval: float = 0.25  # while there are few outcomes, and no worker has failed
    report_timeout: float = 2.0
    report_retry: float = 10.0  # how long a report is retried, with one router after another


@dataclass(frozen=True, slots=True)
class RouterPlacement(Placed):
    """A placement and the router that made it."""

    router: _Router


@dataclass(frozen=True, slots=True)
class RouterReply:
    """One router's reply about the fleet."""

    address: str
    fleet: router_pb2.GetFleetResponse | None  # None: no reply
    problem: str = ""  # the reason for no reply


class _Report(NamedTuple):
    outcome: router_pb2.PlacementOutcome
    until: float  # monotonic seconds; dropped afterwards


@dataclass(slots=True, eq=False)
class _Router:
    link: RouterLink
    outcomes: deque[_Report] = field(default_factory=lambda: deque(maxlen=_MAX_REPORTS))


class RouterClient:
    """Uses one router at a time and switches to the next when it is lost, for the lifetime of an `async with`."""

    def __init__(
        self,
        addresses: Sequence[str],
        on_models: Callable[[Sequence[types_pb2.ModelInfo]], None],
        counters: GenerationCounters,
        times: RouterTimes | None = None,
        dial: Dial = _PLAIN,
        on_outcome: Callable[[router_pb2.PlacementOutcome, int], None] | None = None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._on_models = on_models
        self._counters = counters
        self._times = times or RouterTimes()
        self._dial = dial
        # called with each placement's outcome and the output tokens of its longest choice
        self._on_outcome = on_outcome
        self._routers: list[_Router] = []
        self._preferred = 0
        self._reports_waiting = asyncio.Event()
        self._reports_due = asyncio.Event()  # there are many, or a worker has failed
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for address in self._addresses:
            link = RouterLink(address, self._dial, on_unwanted=partial(self._give_back, address))
            self._routers.append(_Router(link))
        # Random, so that gateways that start together use different replicas.
        self._preferred = random.randrange(len(self._routers))
        self._tasks = [asyncio.create_task(self._watch_models()), asyncio.create_task(self._send_reports())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in self._routers:  # reports that one router does not accept may go to another
            await self._flush_all()
        for router in self._routers:
            await router.link.close()

    async def place(self, request: router_pb2.PlaceRequest, avoided: Collection[str] = ()) -> RouterPlacement:
        """Requests a placement. Raises the router's refusal, or Unavailable if no router answers.

        `avoided` workers are excluded as long as there are others.
        """
        request.excluded_worker_ids.extend(sorted(avoided))
        started = time.monotonic()
        limit = started + self._time_limit(self._times.total, request)
        answered: ServiceError | None = None
        delay = self._times.first_delay
        self._counters.placements += 1
        while True:
            failures: list[str] = []
            for router in self._in_order():
                try:
                    response = await router.link.place(request, self._times.attempt)
                except NotPlaced as failed:
                    refusal = self._transient_refusal(router, failed)
                    if refusal is not None and answered is None:
                        limit = min(limit, time.monotonic() + self._time_limit(self._times.no_worker, request))
                    answered = refusal or answered
                    if avoided and failed.refused:
                        kept = [one for one in request.excluded_worker_ids if one not in avoided]
                        request.excluded_worker_ids[:] = kept
                        avoided = ()
                    failures.append(f"{router.link.address}: {failed}")
                    self._counters.placement_retries += 1
                else:
                    return RouterPlacement(response, time.monotonic(), started, router)
            left = limit - time.monotonic()
            if left <= 0:
                self._counters.placement_failures += 1
                raise answered or self._no_router_answers(time.monotonic() - started, failures)
            await asyncio.sleep(min(delay * random.uniform(0.8, 1.2), left))  # the last attempt is at the limit
            delay = min(delay * 2, self._times.max_delay)

    async def workers(self) -> Sequence[router_pb2.WorkerEntry]:
        """Returns the workers that a router knows. Raises Unavailable if no router answers."""
        failures: list[str] = []
        started = time.monotonic()
        for router in self._in_order():
            try:
                request = router_pb2.ListWorkersRequest()
                answer: router_pb2.ListWorkersResponse = await router.link.stub.ListWorkers(
                    request, timeout=self._times.attempt
                )
            except grpc.aio.AioRpcError as error:
                failures.append(f"{router.link.address}: {problem_of(error)}")
            else:
                return answer.workers
        raise self._no_router_answers(time.monotonic() - started, failures)

    async def fleets(self, max_placements: int) -> list[RouterReply]:
        """Returns each router's reply about the fleet, the preferred router's first. Raises nothing."""
        request = router_pb2.GetFleetRequest(max_placements=max_placements)
        return list(await asyncio.gather(*(self._fleet_of(router, request) for router in self._in_order())))

    async def explain(self, request: router_pb2.ExplainRequest) -> router_pb2.ExplainResponse:
        """Explains a placement. Raises NotFound if no router knows it, Unavailable if none answers."""
        refusals: list[ServiceError] = []
        failures: list[str] = []
        started = time.monotonic()
        for router in self._in_order():
            try:
                answer: router_pb2.ExplainResponse = await router.link.stub.Explain(
                    request, timeout=self._times.report_timeout
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    refusals.append(error_from_rpc(error, f"router {router.link.address}"))
                failures.append(f"{router.link.address}: {problem_of(error)}")
            else:
                return answer
        raise refusals[0] if refusals else self._no_router_answers(time.monotonic() - started, failures)

    async def _fleet_of(self, router: _Router, request: router_pb2.GetFleetRequest) -> RouterReply:
        try:
            fleet: router_pb2.GetFleetResponse = await router.link.stub.GetFleet(request, timeout=self._times.attempt)
        except grpc.aio.AioRpcError as error:
            return RouterReply(router.link.address, None, problem_of(error))
        return RouterReply(router.link.address, fleet)

    def report(self, placed: Placed, outcome: router_pb2.PlacementOutcome, longest: int = 0) -> None:
        """Queues a placement's outcome for its router. `longest`: output tokens of its longest choice."""
        if self._on_outcome is not None:
            self._on_outcome(outcome, longest)
        assert isinstance(placed, RouterPlacement), "this client made the placement"
        outcomes = placed.router.outcomes
        if len(outcomes) == outcomes.maxlen:
            self._counters.dropped_reports += 1
        outcomes.append(_Report(outcome, time.monotonic() + self._times.report_retry))
        self._reports_waiting.set()
        if outcome.worker_failed or len(outcomes) >= _FEW_REPORTS:
            self._reports_due.set()

    def _give_back(self, address: str, response: router_pb2.PlaceResponse) -> None:
        """Reports a placement that arrived after its request was cancelled, so that the router stops counting it."""
        router = next(one for one in self._routers if one.link.address == address)
        outcome = router_pb2.PlacementOutcome(placement_id=response.placement_id)
        now = time.monotonic()
        self.report(RouterPlacement(response, now, now, router), outcome)

    def _time_limit(self, seconds: float, request: router_pb2.PlaceRequest) -> float:
        return min(seconds, request.timeout_ms / 1000) if request.timeout_ms else seconds

    def _in_order(self) -> list[_Router]:
        return self._routers[self._preferred :] + self._routers[: self._preferred]

    def _transient_refusal(self, router: _Router, failed: NotPlaced) -> ServiceError | None:
        """Returns a refusal that another router may not repeat, or None if the router is lost.

        Raises a final refusal.
        """
        refusal = failed.error
        names_no_worker = isinstance(refusal, NotFound) and refusal.field == "worker_id"
        if refusal.code not in _TRANSIENT or names_no_worker:
            self._counters.placement_failures += 1
            raise refusal from failed
        self._avoid(router)
        if not failed.refused:
            return None
        # A router that has just started knows no workers, and therefore no models.
        return Unavailable(
            f"router {router.link.address}: {refusal.message}",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=refusal.retry_after_ms or _RETRY_AFTER_MS,
        )

    def _avoid(self, router: _Router) -> None:
        if self._routers[self._preferred] is router:
            self._preferred = (self._preferred + 1) % len(self._routers)

    def _no_router_answers(self, seconds: float, failures: list[str]) -> Unavailable:
        return Unavailable(
            f"no router answered within {seconds:.1f} s ({'; '.join(failures)})",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=_RETRY_AFTER_MS,
        )

    async def _watch_models(self) -> None:
        delay = self._times.first_delay
        while True:
            router = self._routers[self._preferred]
            try:
                async for response in router.link.stub.WatchModels(router_pb2.WatchModelsRequest()):
                    delay = self._times.first_delay
                    self._on_models(response.models)
                problem = "the router ended the stream"
            except grpc.aio.AioRpcError as error:
                problem = problem_of(error)
            except Exception as error:
                _log.exception("failed to handle the models of router %s", router.link.address)
                problem = type(error).__name__
            _log.info("lost the stream of served models from router %s: %s", router.link.address, problem)
            self._avoid(router)
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(delay * 2, self._times.max_delay)

    async def _send_reports(self) -> None:
        while True:
            await self._reports_waiting.wait()
            await asyncio.sleep(self._times.report_interval)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.few_reports_interval - self._times.report_interval):
                    await self._reports_due.wait()
            self._reports_waiting.clear()
            self._reports_due.clear()
            if not await self._flush_all():
                await asyncio.sleep(_REPORT_PAUSE_SECONDS)

    async def _flush_all(self) -> bool:
        return all(await asyncio.gather(*(self._flush(router) for router in self._routers)))

    async def _flush(self, router: _Router) -> bool:
        """Sends the reports queued now. Returns whether the router accepted all of them."""
        # Reports that are queued meanwhile go together, an interval later.
        left_now = len(router.outcomes)
        while left_now and router.outcomes:
            batch = [router.outcomes.popleft() for _ in range(min(_REPORT_BATCH, left_now, len(router.outcomes)))]
            left_now -= len(batch)
            try:
                await router.link.stub.Report(
                    router_pb2.ReportRequest(outcomes=[report.outcome for report in batch]),
                    timeout=self._times.report_timeout,
                )
            except grpc.aio.AioRpcError as error:
                left = [*batch, *router.outcomes]
                router.outcomes.clear()
                _log.info("router %s did not accept %d outcomes: %s", router.link.address, len(left), error.code().name)
                self._requeue(router, left)
                return False
        return True

    def _requeue(self, lost: _Router, reports: Sequence[_Report]) -> None:
        """Queues lost reports for another router, or the same one if there is no other: routers share their
        placements.
        """
        target = next((one for one in self._in_order() if one is not lost), lost)
        now = time.monotonic()
        kept = [report for report in reports if report.until > now]
        self._counters.dropped_reports += len(reports) - len(kept)
        if kept:
            target.outcomes.extend(kept)
            self._reports_waiting.set()
