"""Serves baton.v1.RouterService from a Placer and a Fleet."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, cast

import grpc

from baton.router.fleet.fleet import Fleet, Worker
from baton.router.fleet.worker_view import WorkerView
from baton.router.garbage import CallGarbage
from baton.router.grpc.fleet_report import FleetReport
from baton.router.grpc.placement_log import PlacementLog
from baton.router.grpc.placement_queue import PlacementQueue
from baton.router.grpc.placement_spans import PlacementSpans
from baton.router.index.prefix_index import PrefixIndex
from baton.router.metrics import RouterMetrics
from baton.router.peers.news import PeerNews
from baton.router.peers.peers import Peers
from baton.router.placement.placer import Placer
from baton.rpc.errors import InvalidRequest, NotFound, ServiceError, Unavailable
from baton.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)

SERVICE_NAME = "baton.v1.RouterService"

_OUTCOMES_A_TURN = 8  # of a report: 0.1 ms

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The gRPC side of one router. A FleetListener."""

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        index: PrefixIndex,
        metrics: RouterMetrics,
        news: PeerNews,
        peers: Peers | None = None,
        spans: PlacementSpans | None = None,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._index = index
        self._metrics = metrics
        self._news = news
        self._peers = peers
        self._spans = spans
        self._placement_log = PlacementLog()
        self._report = FleetReport()
        self._garbage = CallGarbage()
        self._models_changed = asyncio.Event()
        self._place_streams: set[PlacementQueue] = set()
        self._closing = False
        fleet.listen(self)

    def close(self) -> None:
        """Ends all streams."""
        self._closing = True
        for stream in self._place_streams:
            stream.close()
        self._placement_log.flush()
        self.on_models()

    def place(self, request: router_pb2.PlaceRequest) -> router_pb2.PlaceResponse:
        """Places one request. Does not wait."""
        began = time.perf_counter()
        try:
            response = self._placer.place(request)
        except ServiceError as error:
            self._count_refusal(error)
            _log.info("not placed: %s", error.log_text, extra={"request_id": request.request_id})
            if self._spans is not None:
                self._spans.refused(request, time.perf_counter() - began, error.code.name)
            raise
        self._metrics.placed(response.HasField("prefill"), time.perf_counter() - began)
        decision = self._placer.decisions.get(response.placement_id)
        if decision is not None:
            self._report.placed(decision)
        if self._spans is not None:
            self._spans.placed(request, time.perf_counter() - began, decision)
        if request.priority <= 0:  # lines of batches are many, and each is a detail
            self._placement_log.add(request.request_id, response.decode.worker_id, response.prefill.worker_id)
        return response

    def report(self, outcomes: Iterable[router_pb2.PlacementOutcome]) -> None:
        """Takes the outcomes of placements. Does not wait."""
        for reported in outcomes:
            outcome = self._placer.report(reported)
            if outcome is not None:
                self._metrics.reported(outcome)
                self._report.reported(outcome, reported)

    async def Place(self, request: router_pb2.PlaceRequest, context: Context) -> router_pb2.PlaceResponse:  # noqa: N802
        self._garbage.called()
        return self.place(request)

    async def PlaceStream(  # noqa: N802
        self, request_iterator: AsyncIterator[router_pb2.PlaceStreamRequest], context: Context
    ) -> AsyncIterator[router_pb2.PlaceStreamResponse]:
        if self._closing:
            raise Unavailable("the router ends")
        stream = PlacementQueue(self.place, self._count_refusal)
        reading = asyncio.create_task(self._read(stream, request_iterator))
        self._place_streams.add(stream)

        def end(_: object) -> None:
            reading.cancel()
            stream.end()
            self._place_streams.discard(stream)

        # Not a `finally`: a call cancelled while a message is being written leaves this generator suspended.
        context.add_done_callback(cast(Any, end))
        while (message := await stream.take()) is not None:
            yield message

    async def _read(self, stream: PlacementQueue, messages: AsyncIterator[router_pb2.PlaceStreamRequest]) -> None:
        with contextlib.suppress(grpc.aio.UsageError, grpc.aio.AioRpcError):  # the call ended under the reader
            await stream.read(messages)

    async def Report(self, request: router_pb2.ReportRequest, context: Context) -> router_pb2.ReportResponse:  # noqa: N802
        outcomes = iter(request.outcomes)
        try:
            for _ in range(_OUTCOMES_A_TURN, len(request.outcomes), _OUTCOMES_A_TURN):
                self.report(itertools.islice(outcomes, _OUTCOMES_A_TURN))
                await asyncio.sleep(0)  # placements have their turn
        finally:
            self.report(outcomes)  # also of a call whose client is gone
        return router_pb2.ReportResponse()

    async def Explain(self, request: router_pb2.ExplainRequest, context: Context) -> router_pb2.ExplainResponse:  # noqa: N802
        if request.WhichOneof("placement") is None:
            raise InvalidRequest("give placement_id or request_id", field="placement_id")
        try:
            response = self._placer.decisions.explain(request)
        except NotFound:
            if self._peers is None or request.only_here or not len(self._peers):
                raise
            return await self._peers.explain(request)
        response.router_id = self._news.router_id
        return response

    async def ListWorkers(  # noqa: N802
        self, request: router_pb2.ListWorkersRequest, context: Context
    ) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(workers=self._entries())

    async def GetFleet(self, request: router_pb2.GetFleetRequest, context: Context) -> router_pb2.GetFleetResponse:  # noqa: N802
        num_in_flight, now = len(self._placer.in_flight), time.monotonic()
        response = self._report.message(self._entries(), num_in_flight, request.max_placements, now)
        response.router_id = self._news.router_id
        return response

    async def WatchModels(  # noqa: N802
        self, request: router_pb2.WatchModelsRequest, context: Context
    ) -> AsyncIterator[router_pb2.WatchModelsResponse]:
        while not self._closing:
            changed = self._models_changed
            yield router_pb2.WatchModelsResponse(models=self._fleet.models.values())
            await changed.wait()

    async def Cordon(self, request: router_pb2.CordonRequest, context: Context) -> router_pb2.CordonResponse:  # noqa: N802
        self._news.on_cordon(self._fleet.cordon(request.worker_id, True))
        _log.info("worker %s is cordoned", request.worker_id)
        return router_pb2.CordonResponse()

    async def Uncordon(self, request: router_pb2.UncordonRequest, context: Context) -> router_pb2.UncordonResponse:  # noqa: N802
        self._news.on_cordon(self._fleet.cordon(request.worker_id, False))
        _log.info("worker %s is no longer cordoned", request.worker_id)
        return router_pb2.UncordonResponse()

    def on_models(self) -> None:
        """Wakes all WatchModels streams."""
        changed, self._models_changed = self._models_changed, asyncio.Event()
        changed.set()

    def on_state(self, view: WorkerView, is_new: bool) -> None:
        """Does nothing: models are reported when they change."""

    def on_lost(self, worker_id: str) -> None:
        """Does nothing: models are reported when they change."""

    def _count_refusal(self, error: ServiceError) -> None:
        self._metrics.refusals.labels(error.code.name).inc()
        self._report.refused()

    def _entries(self) -> Iterator[router_pb2.WorkerEntry]:
        return map(self._entry, sorted(self._fleet, key=lambda worker: worker.address))

    def _entry(self, worker: Worker) -> router_pb2.WorkerEntry:
        entry = router_pb2.WorkerEntry(
            address=worker.address,
            state=worker.state,
            alive=worker.alive,
            cordoned=self._fleet.is_cordoned(worker.worker_id),
            num_in_flight=self._placer.in_flight.load(worker.worker_id).num_placements,
            num_indexed_blocks=self._index.num_blocks(worker.worker_id),
            problem=worker.problem,
        )
        if worker.view is not None and worker.view.draining:
            entry.state.draining = True  # discovery may say so before the worker does
        return entry
