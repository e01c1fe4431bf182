"""Explains a placement and its request's times, as JSON. Pure."""

from __future__ import annotations

import msgspec

from baton.v1 import router_pb2


class Times(msgspec.Struct):
    """Times in seconds from the first placement attempt; see baton.v1.RequestTimes."""

    place: float
    queue: float
    prefill: float
    transfer: float  # 0: nothing was transferred
    transfer_exposed: float
    transfer_bytes: int
    first_token: float | None  # from the placement attempt
    decode: float
    itl: float | None
    preemptions: int


class Result(msgspec.Struct):
    """The outcome of a placement."""

    worker_failed: bool
    cached_tokens: int
    output_tokens: int
    times: Times | None


class Candidate(msgspec.Struct):
    """A candidate placement, with the delay that it would add, in seconds."""

    decode: str
    prefill: str  # empty: the decode worker prefills
    total: float
    costs: dict[str, float]


class WorkerEvidence(msgspec.Struct):
    """What the router knew of one worker; see baton.v1.Evidence."""

    worker_id: str
    refusal: str  # empty: the worker was considered
    cached_tokens: int
    host_cached_tokens: int
    num_requests: int
    num_waiting: int
    backlog: float
    state_age: float
    is_measured: bool
    prefill_tokens_per_second: float
    transfer_bytes_per_second: float


class Explanation(msgspec.Struct):
    """The explanation of one placement."""

    placement_id: str
    request_id: str
    model: str
    adapter: str
    tenant: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    expected_output_tokens: float
    decode: str
    prefill: str
    decode_cached_tokens: int  # expected
    prefill_cached_tokens: int
    excluded: list[str]  # workers excluded because they failed the request
    result: Result | None  # null: not reported yet
    ways: list[Candidate]  # all candidates with costs; the first was chosen
    evidence: list[WorkerEvidence]


def explanation_of(explained: router_pb2.ExplainResponse) -> Explanation:
    """Converts a router's explanation to JSON. Leaves out the prompt's hashes."""
    request, response = explained.request, explained.response
    return Explanation(
        placement_id=str(response.placement_id),
        request_id=request.request_id,
        model=request.model,
        adapter=request.adapter,
        tenant=request.tenant,
        priority=request.priority,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        expected_output_tokens=explained.expected_output_tokens,
        decode=response.decode.worker_id,
        prefill=response.prefill.worker_id,
        decode_cached_tokens=response.decode_cached_tokens,
        prefill_cached_tokens=response.prefill_cached_tokens,
        excluded=list(request.excluded_worker_ids),
        result=_result(explained.outcome) if explained.HasField("outcome") else None,
        ways=[_candidate(candidate) for candidate in response.candidates],
        evidence=[_worker_evidence(one) for one in explained.evidence],
    )


def _result(outcome: router_pb2.PlacementOutcome) -> Result:
    times = _times(outcome) if outcome.HasField("times") else None
    return Result(outcome.worker_failed, outcome.num_cached_tokens, outcome.num_output_tokens, times)


def _times(outcome: router_pb2.PlacementOutcome) -> Times:
    times = outcome.times
    return Times(
        place=times.place_us * 1e-6,
        queue=times.queue_us * 1e-6,
        prefill=times.prefill_us * 1e-6,
        transfer=times.transfer_us * 1e-6,
        transfer_exposed=times.transfer_exposed_us * 1e-6,
        transfer_bytes=times.num_transfer_bytes,
        first_token=(times.place_us + outcome.first_token_us) * 1e-6 if outcome.first_token_us else None,
        decode=times.decode_us * 1e-6,
        itl=times.mean_itl_us * 1e-6 or None,
        preemptions=times.num_preemptions,
    )


def _candidate(candidate: router_pb2.Candidate) -> Candidate:
    costs = {}
    for cost in candidate.costs:
        name = router_pb2.CostKind.Name(cost.kind).removeprefix("COST_KIND_").lower()
        costs[name] = cost.seconds
    return Candidate(candidate.decode_worker_id, candidate.prefill_worker_id, candidate.total_seconds, costs)


def _worker_evidence(one: router_pb2.Evidence) -> WorkerEvidence:
    return WorkerEvidence(
        worker_id=one.worker_id,
        refusal=one.refusal,
        cached_tokens=one.num_cached_tokens,
        host_cached_tokens=one.num_host_cached_tokens,
        num_requests=one.num_requests,
        num_waiting=one.num_waiting,
        backlog=one.backlog_seconds,
        state_age=one.state_age_seconds,
        is_measured=one.is_measured,
        prefill_tokens_per_second=one.prefill_tokens_per_second,
        transfer_bytes_per_second=one.transfer_bytes_per_second,
    )
