"""The spans of one client's request at this gateway, which cover it without gaps from the headers to the last byte.

    baton.gateway.request     the whole request; its parent is the span in the client's trace context
    baton.gateway.prepare     parsing, keys, limits, template, tokens and hashes, until the first placement
    baton.gateway.place       requesting a placement, including attempts and waits
    baton.gateway.generate    the choices on one worker, from their placement to the worker's last message
    baton.gateway.answer      the rest until the last byte, if it takes at least a 200th of the request

A generation carries only a traceparent; `GatewayTracing.of` finds its trace.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import final

from baton.gateway.routers.placer import Placed, Placer
from baton.rpc.errors import ServiceError
from baton.rpc.tracing.context import SpanContext, sampled_context
from baton.rpc.tracing.tracer import CLIENT, INTERNAL, SERVER, Kind, Tracer, Value
from baton.v1 import router_pb2, worker_pb2

_LEAST_PART = 200  # a shorter rest, as a fraction of the request, gets no span


@final
class RequestTrace:
    """A traced request, shared by all its choices and prompts."""

    __slots__ = (
        "_facts",
        "_last_ns",
        "_num_failovers",
        "_num_output_tokens",
        "_num_preemptions",
        "_prepared",
        "began_ns",
        "context",
        "parent_id",
        "tracer",
    )

    def __init__(self, tracer: Tracer, context: SpanContext, parent_id: bytes, began_ns: int) -> None:
        self.tracer = tracer
        self.context = context
        self.parent_id = parent_id  # empty: the client has no span
        self.began_ns = began_ns
        self._last_ns = began_ns  # end of the last part
        self._prepared = False
        self._facts: dict[str, Value] = {}
        self._num_failovers = 0
        self._num_output_tokens = 0
        self._num_preemptions = 0

    async def place(self, router: Placer, request: router_pb2.PlaceRequest, avoided: Collection[str]) -> Placed:
        """Requests a placement. Raises the router's refusal."""
        began, context = self._prepare(), self.context.child()
        request.traceparent = context.traceparent
        self._facts.update(_facts_of(request))
        facts: dict[str, Value] = {"baton.excluded_workers": len(request.excluded_worker_ids) + len(avoided)}
        error = "cancelled"
        try:
            placed = await router.place(request, avoided)
            error = ""
            facts |= _facts_of_placement(placed.response)
        except ServiceError as refused:
            error = refused.code.name
            raise
        finally:
            self.record("baton.gateway.place", context, began, facts, error, CLIENT)
        return placed

    def generate(self, placed: Placed) -> GenerateSpan:
        """Returns the span of choices on the worker of a placement."""
        return GenerateSpan(self, placed.response, self._last_ns)

    def ended(self, outcome: router_pb2.PlacementOutcome) -> None:
        """Adds a placement's outcome to the request's totals."""
        self._num_failovers += outcome.worker_failed
        self._num_output_tokens += outcome.num_output_tokens
        self._num_preemptions += outcome.times.num_preemptions
        if outcome.first_token_us and "gen_ai.latency.time_to_first_token" not in self._facts:
            self._facts["gen_ai.latency.time_to_first_token"] = outcome.first_token_us / 1e6
            self._facts["gen_ai.latency.time_in_queue"] = outcome.times.queue_us / 1e6

    def record(
        self,
        name: str,
        context: SpanContext,
        began_ns: int,
        facts: Mapping[str, Value],
        error: str = "",
        kind: Kind = INTERNAL,
    ) -> None:
        """Records a part of the request that ends now."""
        self._last_ns = time.time_ns()
        of = self.context.span_id
        self.tracer.record(name, context, of, began_ns, self._last_ns, facts, kind, error)

    def end(self, facts: Mapping[str, Value], error: str = "") -> None:
        """Records the end of the request."""
        self._prepare()
        now = time.time_ns()
        if (now - self._last_ns) * _LEAST_PART >= now - self.began_ns:
            self.record("baton.gateway.answer", self.context.child(), self._last_ns, {})
        all_facts = {
            **self._facts,
            **facts,
            "baton.failovers": self._num_failovers,
            "baton.output_tokens": self._num_output_tokens,
            "baton.preemptions": self._num_preemptions,
            "gen_ai.usage.output_tokens": self._num_output_tokens,
            "gen_ai.latency.e2e": (now - self.began_ns) / 1e9,
        }
        self.tracer.record(
            "baton.gateway.request", self.context, self.parent_id, self.began_ns, now, all_facts, SERVER, error
        )

    def _prepare(self) -> int:
        """Returns when the next part begins. The first call records the part before it."""
        if self._prepared:
            return time.time_ns()
        self._prepared = True
        self.record("baton.gateway.prepare", self.context.child(), self.began_ns, {})
        return self._last_ns


class GenerateSpan:
    """The span of a placement's choices on their worker."""

    __slots__ = ("_began_ns", "_placed", "_trace", "context")

    def __init__(self, trace: RequestTrace, placed: router_pb2.PlaceResponse, began_ns: int) -> None:
        self.context = trace.context.child()
        self._trace = trace
        self._placed = placed
        self._began_ns = began_ns

    def sign(self, submit: worker_pb2.SubmitRequest) -> None:
        """Makes the worker's spans children of this one."""
        submit.traceparent = self.context.traceparent

    def end(self, outcome: router_pb2.PlacementOutcome) -> None:
        """Ends the span after the worker's last message or its loss."""
        facts = {**_facts_of_placement(self._placed), **_facts_of_outcome(outcome)}
        self._trace.ended(outcome)
        error = "the worker failed" if outcome.worker_failed else ""
        self._trace.record("baton.gateway.generate", self.context, self._began_ns, facts, error, CLIENT)


class GatewayTracing:
    """The traced requests of this process."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._running: dict[str, RequestTrace] = {}  # by the traceparent of their generations

    def begin(self, traceparent: str, began_ns: int) -> RequestTrace | None:
        """Starts the trace of a request. Returns None if it is not sampled."""
        sampled = self._tracer.sampled(traceparent)
        if sampled is None:
            return None
        context, parent_id = sampled
        trace = self._running[context.traceparent] = RequestTrace(self._tracer, context, parent_id, began_ns)
        return trace

    def end(self, trace: RequestTrace, facts: Mapping[str, Value], error: str = "") -> None:
        """Ends a request's trace. Generations that still run stay its children."""
        self._running.pop(trace.context.traceparent, None)
        trace.end(facts, error)

    def of(self, traceparent: str) -> RequestTrace | None:
        """Returns the trace of a generation's request. A trace that began elsewhere has only its parts here."""
        if not traceparent:
            return None
        running = self._running.get(traceparent)
        context = sampled_context(traceparent) if running is None else None
        return running if context is None else RequestTrace(self._tracer, context, b"", time.time_ns())


async def place(
    trace: RequestTrace | None, router: Placer, request: router_pb2.PlaceRequest, avoided: Collection[str]
) -> Placed:
    """Requests a placement, with a span if the request is traced."""
    return await (router.place(request, avoided) if trace is None else trace.place(router, request, avoided))


def _facts_of(request: router_pb2.PlaceRequest) -> dict[str, Value]:
    return {
        "baton.request_id": request.request_id,
        "baton.model": request.model,
        "baton.tenant": request.tenant,
        "baton.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
    }


def _facts_of_placement(placed: router_pb2.PlaceResponse) -> dict[str, Value]:
    return {
        "baton.placement_id": placed.placement_id,
        "baton.worker": placed.decode.worker_id,
        "baton.prefill_worker": placed.prefill.worker_id,
        "baton.predicted_cached_tokens": max(placed.decode_cached_tokens, placed.prefill_cached_tokens),
    }


def _facts_of_outcome(outcome: router_pb2.PlacementOutcome) -> dict[str, Value]:
    times = outcome.times
    facts: dict[str, Value] = {
        "baton.cached_tokens": outcome.num_cached_tokens,
        "baton.output_tokens": outcome.num_output_tokens,
        "baton.first_token_ms": outcome.first_token_us / 1e3,
        "baton.queue_ms": times.queue_us / 1e3,
        "baton.prefill_ms": times.prefill_us / 1e3,
        "baton.preemptions": times.num_preemptions,
    }
    if times.num_transfer_bytes:
        facts["baton.transfer_bytes"] = times.num_transfer_bytes
        facts["baton.transfer_ms"] = times.transfer_us / 1e3
        facts["baton.transfer_exposed_ms"] = times.transfer_exposed_us / 1e3
    return facts
