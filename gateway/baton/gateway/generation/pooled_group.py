"""Texts of one request that are placed on one worker together, until each has its vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.core import PooledText, PoolRequest
from baton.gateway.generation.placement import PlacementUse
from baton.gateway.generation.retry_budget import Loss, RetryBudget, WorkerLost, loss_of
from baton.gateway.generation.running import GenerationServices
from baton.gateway.generation.workers.slot_receiver import IgnoredSlot
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.routers.placer import Placed
from baton.gateway.tracing.request import place
from baton.rpc.block_hash import hash_blocks
from baton.rpc.errors import DataLoss, InternalError, InvalidRequest, NoCapacity, ServiceError, Unavailable
from baton.v1 import router_pb2, types_pb2, worker_pb2

MIN_WAIT_SECONDS = 0.02
_OF_THE_TEXT = (InvalidRequest, InternalError, DataLoss)  # errors whose cause may be the text

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PoolProgress:
    """What the groups of one request have reached."""

    results: list[PooledText | None]  # by text
    begun: bool = False  # a group was placed


class PooledGroup:
    """Places texts, submits them, and collects their vectors in `progress`."""

    def __init__(
        self,
        request: PoolRequest,
        indices: Sequence[int],
        namespace: bytes,
        block_size: int,
        services: GenerationServices,
        progress: PoolProgress,
        max_model_len: int,
        adapter: types_pb2.AdapterInfo | None = None,
    ) -> None:
        self._request = request
        self._indices = indices
        self._namespace = namespace
        self._block_size = block_size
        self._services = services
        self._progress = progress
        self._max_model_len = max_model_len
        self._adapter = adapter
        self._trace = None if services.tracing is None else services.tracing.of(request.traceparent)
        self._budget = RetryBudget(len(indices))
        self._excluded: list[str] = []

    async def run(self) -> None:
        """Returns when all texts have their vectors. Raises the error that a retry cannot help."""
        left = list(range(len(self._indices)))
        while left:
            lost = await self._run_once(left)
            for number, error in lost:
                self._spend(number, error)
            left = [number for number, _ in lost]
            if left:
                self._services.counters.failovers += len(left)
                _log.warning(
                    "moving %d texts to another worker: %s",
                    len(left),
                    lost[0][1].message,
                    extra={"request_id": self._request.request_id},
                )
                await asyncio.sleep(max(map(self._budget.pause_seconds, left)))

    def _spend(self, number: int, error: ServiceError) -> None:
        try:
            self._budget.spend(number, 0, error, error.worker_id)
        except ServiceError as final:
            name = f"input.{self._indices[number]}"
            final.field = final.field.replace("prompt_token_ids", name)
            if isinstance(final, _OF_THE_TEXT):
                final.field = final.field or name
            raise
        if error.worker_id and error.worker_id not in self._excluded:
            self._excluded.append(error.worker_id)

    async def _run_once(self, numbers: Sequence[int]) -> list[tuple[int, ServiceError]]:
        """Runs these texts on one worker. Returns those that it lost or refused."""
        router = self._services.router
        placed = await self._place(numbers)
        use = PlacementUse(router, placed, len(numbers), self._trace and self._trace.generate(placed))
        stream = self._services.streams.get(placed.response.decode)
        ended = asyncio.Event()
        runs = [TextRun(number, use, stream, ended) for number in numbers]
        for run in runs:
            run.submit(use.signed(self._submit_message(run.number)))
        try:
            for run in runs:
                while not run.ended:
                    ended.clear()
                    await ended.wait()
        except BaseException:
            for run in runs:
                run.leave()
            raise
        for run in runs:
            if run.result is not None:
                self._progress.results[self._indices[run.number]] = run.result
        return [(run.number, run.error) for run in runs if run.error is not None]

    async def _place(self, numbers: Sequence[int]) -> Placed:
        """Returns a placement. If the fleet is full, a request that has begun waits; another is refused."""
        message = self._place_message(numbers)
        while True:
            try:
                placed = await place(self._trace, self._services.router, message, self._services.streams.avoided())
            except NoCapacity as full:
                if not self._progress.begun:
                    raise
                await asyncio.sleep(max(MIN_WAIT_SECONDS, (full.retry_after_ms or 0) / 1000))
            else:
                self._progress.begun = True
                return placed

    def _place_message(self, numbers: Sequence[int]) -> router_pb2.PlaceRequest:
        request = self._request
        texts = [request.texts[self._indices[number]] for number in numbers]
        # Routers place one prompt and its output, which together are no longer than the model.
        most = self._max_model_len - 1
        hashes = hash_blocks(self._namespace, texts[0][:most], self._block_size) if len(texts) == 1 else b""
        return router_pb2.PlaceRequest(
            request_id=request.request_id,
            model=request.model,
            block_hashes=hashes,
            num_prompt_tokens=min(sum(map(len, texts)), most),
            max_tokens=1,
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            priority=request.priority,
            timeout_ms=request.timeout_ms,
            excluded_worker_ids=self._excluded,
            adapter="" if self._adapter is None else self._adapter.name,
        )

    def _submit_message(self, number: int) -> worker_pb2.SubmitRequest:
        request, index = self._request, self._indices[number]
        submit = worker_pb2.SubmitRequest(
            request_id=request.request_id if len(request.texts) == 1 else f"{request.request_id}-{index}",
            prompt_token_ids=request.texts[index],
            cache_namespace=self._namespace,
            priority=request.priority,
            timeout_ms=request.timeout_ms,
            tenant=request.tenant,
            traceparent=request.traceparent,
            pooling=request.params,
            adapter="" if self._adapter is None else self._adapter.name,
            adapter_info=self._adapter,
        )
        if request.second_starts:
            submit.pooling.second_text_start = request.second_starts[index]
        return submit


class TextRun(IgnoredSlot):
    """Implements SlotReceiver for one text on one worker."""

    def __init__(self, number: int, use: PlacementUse, stream: WorkerStream, ended: asyncio.Event) -> None:
        self.number = number
        self.result: PooledText | None = None
        self.error: ServiceError | None = None
        self.ended = False
        self._use = use
        self._stream = stream
        self._ended = ended
        self._slot = -1
        self._pooled: worker_pb2.SlotPooled | None = None

    def submit(self, message: worker_pb2.SubmitRequest) -> None:
        """Submits the text. On a stream that has ended, it is lost at once."""
        try:
            self._slot = self._stream.submit(message, self)
        except WorkerLost as error:
            self.on_failure(error)

    def leave(self) -> None:
        """Leaves the worker without waiting for its reply."""
        if not self.ended:
            self._stream.leave(self._slot)
            self._end(None, worker_failed=False)

    def on_pooled(self, pooled: worker_pb2.SlotPooled) -> None:
        self._pooled = pooled
        if self._use.waits:
            self._use.first_token()

    def on_finish(self, finish: worker_pb2.SlotFinish) -> None:
        pooled = self._pooled
        if pooled is None:
            message = f"worker {self._stream.worker_id} ended the request without its vectors"
            self.on_failure(Unavailable(message, phase=types_pb2.PHASE_PREFILL, worker_id=self._stream.worker_id))
            return
        if not pooled.num_vectors or len(pooled.values) % (4 * pooled.num_vectors):
            message = (
                f"worker {self._stream.worker_id} sent {len(pooled.values)} bytes for {pooled.num_vectors} vectors"
            )
            self.on_failure(InternalError(message, worker_id=self._stream.worker_id))
            return
        self.result = PooledText(pooled.values, pooled.num_vectors, finish.num_cached_tokens)
        self._use.finished(finish, 0)
        self._end(finish.num_cached_tokens, worker_failed=False)

    def on_failure(self, error: ServiceError) -> None:
        self.error = error
        self._end(None, worker_failed=loss_of(error) is not Loss.REFUSED)

    def _end(self, cached: int | None, worker_failed: bool) -> None:
        self.ended = True
        self._use.done(0, cached, worker_failed)
        self._ended.set()
