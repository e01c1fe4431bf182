"""The gateways of a simulation, as one: each arrival is placed, submitted, and followed to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from baton.rpc.errors import NoCapacity, ServiceError
from baton.services.simulate.cluster.adapters import adapter_ref
from baton.services.simulate.cluster.metrics import Record
from baton.services.simulate.cluster.router import SimRouter
from baton.services.simulate.cluster.settings import ClusterSettings
from baton.services.simulate.cluster.worker import MODEL, SimWorker
from baton.services.simulate.requests.workloads import Arrival
from baton.services.simulate.virtual.timeline import Timeline
from baton.v1 import router_pb2, types_pb2
from baton.worker.core import Request, SamplingParams, StopConditions, TokenIds
from baton.worker.requests.outputs import Finish, StepOutputs


@dataclass(slots=True)
class _Call:
    """A request that has not ended."""

    arrival: Arrival
    record: Record
    request_id: str
    placement_id: int = 0
    placed: float = 0.0
    output_token_ids: list[int] = field(default_factory=list)  # that a worker gave before it failed
    excluded: list[str] = field(default_factory=list)
    request: Request | None = None


class SimGateway:
    """Owns the records."""

    def __init__(
        self,
        timeline: Timeline,
        settings: ClusterSettings,
        router: SimRouter,
        workers: Mapping[str, SimWorker],
        namespace: bytes,
    ) -> None:
        self.records: list[Record] = []
        self.num_open = 0
        self._timeline = timeline
        self._settings = settings
        self._router = router
        self._workers = workers
        self._namespace = namespace
        self._calls: dict[str, _Call] = {}  # by the engine's request id
        self._num_submitted = 0

    def arrive(self, arrival: Arrival) -> None:
        """Takes a client's request."""
        record = Record(self._timeline.clock.now, arrival.prompt.num_tokens)
        self.records.append(record)
        self.num_open += 1
        self._place(_Call(arrival, record, f"r{len(self.records)}"))

    def on_outputs(self, worker: SimWorker, outputs: StepOutputs) -> None:
        """Takes the outputs of a worker's step, at the worker's time."""
        time = worker.clock.now
        # A step that only decodes brings one token of each, unless a prefill worker's first token is among them.
        if outputs.num_prefill_tokens or len(outputs.requests) != outputs.num_decodes:
            self._find_first_tokens(outputs, time)
        for finish in outputs.finishes:
            if finish.request.request_id in self._calls:
                self._timeline.at(time, partial(self._finish, worker, finish))
        for failure in outputs.failures:
            call = self._calls.get(failure.request.request_id)
            if call is not None:
                self._timeline.at(time, partial(self._failed, call, worker, failure.error))

    def on_refused(self, worker: SimWorker, request: Request, error: ServiceError) -> None:
        """Takes a worker's refusal of a request."""
        call = self._calls.get(request.request_id)
        if call is not None:
            self._failed(call, worker, error)

    def lose(self, worker: SimWorker) -> None:
        """Takes the end of a worker's streams: its requests continue elsewhere."""
        for call in list(self._calls.values()):
            if call.record.worker_id == worker.worker_id:
                self._failed(call, worker, None)

    def _place(self, call: _Call) -> None:
        arrival, record = call.arrival, call.record
        prompt = arrival.prompt
        record.num_attempts += 1
        request = router_pb2.PlaceRequest(
            request_id=call.request_id,
            model=MODEL,
            block_hashes=prompt.block_hashes,
            num_prompt_tokens=prompt.num_tokens,
            max_tokens=arrival.max_tokens,
            tenant=arrival.tenant,
            excluded_worker_ids=call.excluded,
            adapter=arrival.adapter,
        )
        try:
            response = self._router.place(request, self._timeline.clock.now)
        except ServiceError as error:
            self._end(call, error.code.name)
            return
        call.placement_id, call.placed = response.placement_id, self._timeline.clock.now
        record.worker_id = response.decode.worker_id
        record.prefill_worker_id = response.prefill.worker_id
        record.num_predicted_tokens = max(response.decode_cached_tokens, response.prefill_cached_tokens)
        prefill = response.prefill if response.HasField("prefill") else None
        self._num_submitted += 1
        call.request = self._request(call, f"{call.request_id}#{self._num_submitted}", prefill)
        self._calls[call.request.request_id] = call
        request_of_engine, worker = call.request, self._workers[record.worker_id]
        delays = self._settings.delays
        self._timeline.after(delays.place + delays.submit, lambda: self._submit(worker, request_of_engine, prefill))

    def _request(self, call: _Call, name: str, prefill: types_pb2.Endpoint | None) -> Request:
        arrival = call.arrival
        token_ids = arrival.prompt.token_ids()
        num_prompt_tokens = len(token_ids)
        if call.output_token_ids:
            token_ids = np.concatenate((token_ids, np.array(call.output_token_ids, np.int32)))
        return Request(
            request_id=name,
            token_ids=TokenIds(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(temperature=0.0, seed=arrival.output_content),
            stop=StopConditions(arrival.num_output_tokens),
            cache_namespace=arrival.namespace or self._namespace,
            arrival=call.record.arrived,
            remote_prefill=prefill is not None,
            adapter=adapter_ref(arrival.adapter) if arrival.adapter else None,
        )

    def _submit(self, worker: SimWorker, request: Request, prefill: types_pb2.Endpoint | None) -> None:
        if request.request_id not in self._calls:
            return  # moved on meanwhile
        if not worker.alive:
            self._failed(self._calls[request.request_id], worker, None)
            return
        worker.submit(request, prefill, self._calls[request.request_id].arrival.prompt.hash_list())

    def _find_first_tokens(self, outputs: StepOutputs, time: float) -> None:
        for request in outputs.requests:
            if len(request.token_ids) == request.num_prompt_tokens + 1:
                call = self._calls.get(request.request_id)
                if call is not None:
                    call.record.first_token = time + self._settings.delays.submit
                    self._timeline.at(call.record.first_token, partial(self._report_first_token, call))

    def _report_first_token(self, call: _Call) -> None:
        self._router.clock.now = self._timeline.clock.now
        self._router.policy.first_token(call.placement_id)

    def _finish(self, worker: SimWorker, finish: Finish) -> None:
        call = self._calls.pop(finish.request.request_id, None)
        if call is None:
            return
        record, request = call.record, finish.request
        record.finished = self._timeline.clock.now + self._settings.delays.submit
        record.num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        record.num_cached_tokens = finish.num_cached_tokens + request.num_prefill_cached_tokens
        record.num_preemptions += finish.num_preemptions
        if not finish.num_transferred_tokens:
            record.prefill_worker_id = ""
        self.num_open -= 1
        self._report(call, record.num_cached_tokens, record.num_output_tokens, failed=False)

    def _failed(self, call: _Call, worker: SimWorker, error: ServiceError | None) -> None:
        """Takes a request that a worker gave up (`error` None: it died). Places it again, without that worker."""
        request = call.request
        assert request is not None, "only what was submitted can fail"
        if self._calls.pop(request.request_id, None) is None:
            return
        if error is None:
            call.output_token_ids = request.token_ids[request.num_prompt_tokens :]
        self._report(call, 0, 0, failed=True)
        call.excluded.append(worker.worker_id)
        if call.record.num_attempts >= self._settings.max_attempts:
            self._end(call, (error or NoCapacity("no attempt is left")).code.name)
        else:
            self._place(call)

    def _end(self, call: _Call, error: str) -> None:
        call.record.error = error
        self.num_open -= 1

    def _report(self, call: _Call, num_cached: int, num_output: int, failed: bool) -> None:
        self._router.clock.now = self._timeline.clock.now
        first_token = call.record.first_token
        self._router.policy.report(
            router_pb2.PlacementOutcome(
                placement_id=call.placement_id,
                num_cached_tokens=num_cached,
                num_output_tokens=num_output,
                first_token_us=round((first_token - call.placed) * 1e6) if first_token > call.placed else 0,
                worker_failed=failed,
            )
        )
