"""A decision as router.proto says it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.router.placement.policy import Option
from baton.router.placement.worker_snapshot import WorkerSnapshot
from baton.v1 import router_pb2, types_pb2

_KINDS = (
    router_pb2.COST_KIND_QUEUE,
    router_pb2.COST_KIND_PREFILL,
    router_pb2.COST_KIND_TRANSFER,
    router_pb2.COST_KIND_DECODE,
    router_pb2.COST_KIND_MEMORY,
    router_pb2.COST_KIND_RESTORE,
    router_pb2.COST_KIND_ADAPTER,
    router_pb2.COST_KIND_LATER,
)


def response_of(placement_id: int, chosen: Option, candidates: Sequence[Option] = ()) -> router_pb2.PlaceResponse:
    """Returns the response to a PlaceRequest. For Explain, `candidates` has the chosen option first."""
    decode, prefill = chosen.decode, chosen.prefill
    return router_pb2.PlaceResponse(
        placement_id=placement_id,
        decode=_endpoint(decode),
        prefill=_endpoint(prefill) if prefill is not None else None,
        decode_cached_tokens=decode.num_cached_tokens,
        prefill_cached_tokens=prefill.num_cached_tokens if prefill is not None else 0,
        candidates=map(_candidate, candidates),
    )


def evidence_of(
    snapshots: Sequence[WorkerSnapshot], refused: Mapping[str, str], at: float
) -> list[router_pb2.Evidence]:
    """Returns what was known of each worker, and why the others were refused."""
    told = [_evidence(one, at) for one in snapshots]
    return told + [router_pb2.Evidence(worker_id=name, refusal=why) for name, why in sorted(refused.items())]


def _endpoint(one: WorkerSnapshot) -> types_pb2.Endpoint:
    view = one.view
    return types_pb2.Endpoint(worker_id=view.worker_id, epoch=view.epoch, address=view.address)


def _candidate(option: Option) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        decode_worker_id=option.decode.view.worker_id,
        prefill_worker_id=option.prefill.view.worker_id if option.prefill is not None else "",
        total_seconds=option.total,
        costs=[
            router_pb2.Cost(kind=kind, seconds=seconds)
            for kind, seconds in zip(_KINDS, option.costs, strict=True)
            if seconds
        ],
    )


def _evidence(one: WorkerSnapshot, at: float) -> router_pb2.Evidence:
    rates = one.rates
    return router_pb2.Evidence(
        worker_id=one.view.worker_id,
        num_cached_tokens=one.num_cached_tokens - one.num_host_tokens,
        num_host_cached_tokens=one.num_host_tokens,
        num_requests=one.num_requests,
        num_waiting=one.num_waiting,
        backlog_seconds=one.backlog_seconds,
        state_age_seconds=max(0.0, at - one.view.received),
        is_measured=rates.is_measured,
        prefill_tokens_per_second=rates.prefill_tokens_per_second,
        transfer_bytes_per_second=rates.transfer_bytes_per_second,
        step_base_seconds=rates.step.base,
        step_slope_seconds=rates.step.slope,
        step_context_slope_seconds=rates.step.context_slope,
    )
