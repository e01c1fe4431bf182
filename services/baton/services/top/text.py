"""Console output as lines of text: the fleet, its workers, flows and requests, and the time of a request. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from baton.gateway.console.explanation import Explanation, Times
from baton.gateway.console.snapshot import FleetSight, FlowSight, Percentiles, PlacementSight, Snapshot, WorkerSight
from baton.services.top import words
from baton.services.top.table import Column, cut, render

_STATES = ("dead", "cordoned", "draining", "serving")
_BAR = 8
_LANE = 40
_MOST_WAYS = 8

WORKERS: Sequence[Column[WorkerSight]] = (
    Column(
        "WORKER",
        lambda w: words.printable(w.worker_id or w.address),
        lambda w: words.natural(w.worker_id or w.address),
        False,
    ),
    Column("ROLE", lambda w: w.role, lambda w: w.role, False),
    Column("STATE", lambda w: w.state, lambda w: _STATES.index(w.state), False),
    Column("RUN", lambda w: words.count(w.running), lambda w: -w.running),
    Column("QUEUE", lambda w: words.count(w.queue_depth), lambda w: -w.queue_depth),
    Column(
        "KV USED", lambda w: f"{words.bar(w.kv_usage, _BAR)} {words.percent(w.kv_usage):>5}", lambda w: -_n(w.kv_usage)
    ),
    Column("HITS", lambda w: words.percent(w.hit_rate), lambda w: -_n(w.hit_rate)),
    Column("OUTPUT", lambda w: words.rate(w.output_tokens_per_second), lambda w: -_n(w.output_tokens_per_second)),
    Column("A STEP", lambda w: words.short(w.tokens_per_step), lambda w: -_n(w.tokens_per_step)),
    Column("ADAPTERS", lambda w: words.out_of(w.num_adapters, w.num_adapter_slots), lambda w: -_n(w.num_adapters)),
    Column("PROMPTS", lambda w: words.rate(w.prompt_tokens_per_second), lambda w: -_n(w.prompt_tokens_per_second)),
    Column("KV IN", lambda w: words.bandwidth(w.received_bytes_per_second), lambda w: -_n(w.received_bytes_per_second)),
    Column("PREEMPTED", lambda w: words.count(w.preemptions), lambda w: -w.preemptions),
    Column("EPOCH", lambda w: w.epoch, lambda w: w.epoch),
    Column("PROBLEM", lambda w: words.printable(w.problem), lambda w: w.problem, False),
)
FLOWS: Sequence[Column[FlowSight]] = (
    Column("FROM", lambda f: words.printable(f.sender), lambda f: words.natural(f.sender), False),
    Column("TO", lambda f: words.printable(f.receiver), lambda f: words.natural(f.receiver), False),
    Column("BYTES", lambda f: words.bandwidth(f.bytes_per_second), lambda f: -f.bytes_per_second),
    Column("TRANSFERS", lambda f: words.rate(f.transfers_per_second), lambda f: -f.transfers_per_second),
)
REQUESTS: Sequence[Column[PlacementSight]] = (
    Column(
        "REQUEST",
        lambda p: words.printable(p.request_id or p.placement_id),
        lambda p: words.natural(p.request_id),
        False,
    ),
    Column("STATE", lambda p: p.state, lambda p: p.state, False),
    Column("AGE", lambda p: words.age(p.age), lambda p: p.age),
    Column("TTFT", lambda p: words.duration(p.ttft), lambda p: -_n(p.ttft)),
    Column("ITL", lambda p: words.duration(p.itl), lambda p: -_n(p.itl)),
    Column("TOTAL", lambda p: words.duration(p.seconds), lambda p: -_n(p.seconds)),
    Column("DECODE", lambda p: words.printable(p.decode), lambda p: words.natural(p.decode), False),
    Column("PREFILL", lambda p: words.printable(p.prefill) or "there", lambda p: words.natural(p.prefill), False),
    Column("PROMPT", lambda p: words.count(p.prompt_tokens), lambda p: -p.prompt_tokens),
    Column("CACHED", lambda p: words.count(p.cached_tokens), lambda p: -_n(p.cached_tokens)),
    Column("OUTPUT", lambda p: words.count(p.output_tokens), lambda p: -_n(p.output_tokens)),
)


def head(snapshot: Snapshot, width: int) -> list[str]:
    """Returns the fleet's totals and problems."""
    fleet = snapshot.fleet
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    lines = [
        f"Workers {fleet.num_alive} of {fleet.num_workers} alive   Running {words.count(fleet.running)}, "
        f"{words.count(fleet.queue_depth)} queued   KV used {words.percent(fleet.kv_usage)}   "
        f"Hit rate {words.percent(fleet.hit_rate)}   {clock}",
        f"Tokens out {words.rate(fleet.output_tokens_per_second)}, in {words.rate(fleet.prompt_tokens_per_second)}   "
        f"Requests {words.rate(fleet.placements_per_second)}{_trouble(fleet)}   "
        f"KV moved {words.bandwidth(fleet.transfer_bytes_per_second)}",
        f"TTFT {_percentiles(fleet.ttft)}   ITL {_percentiles(fleet.itl)}   "
        f"of the last {fleet.percentile_seconds:.0f} s",
    ]
    return [line[:width] for line in [*lines, *problems(snapshot)]]


def problems(snapshot: Snapshot) -> list[str]:
    """Returns the fleet's problems, or an empty string."""
    silent = [f"{one.address}: {words.printable(one.problem)}" for one in snapshot.routers if one.problem]
    if snapshot.heard_age is None:
        return [f"! No router has answered yet ({'; '.join(silent)})"]
    if len(silent) == len(snapshot.routers):
        return [f"! No router answers ({'; '.join(silent)}); this is {words.duration(snapshot.heard_age)} old"]
    lines = [f"! A router does not answer: {one}" for one in silent]
    if not snapshot.workers:
        lines.append("! The routers have no workers yet")
    elif not snapshot.fleet.num_alive:
        lines.append("! No worker is alive: requests are refused")
    return lines


def report(snapshot: Snapshot, width: int) -> list[str]:
    """Returns the whole view, for output without a screen."""
    lines = [*head(snapshot, width), ""]
    if snapshot.workers:
        lines += [*render(WORKERS, sorted(snapshot.workers, key=WORKERS[0].key), width), ""]
    if snapshot.flows:
        lines += [*render(FLOWS, snapshot.flows, width), ""]
    if snapshot.placements:
        lines += render(REQUESTS, snapshot.placements, width)
    else:
        lines.append("No request has been placed yet.")
    return [line[:width] for line in lines]


def explained(explanation: Explanation, width: int) -> list[str]:
    """Returns the time line of a request, and the reasons of its placement."""
    expected = max(explanation.decode_cached_tokens, explanation.prefill_cached_tokens)
    lines = [
        f"Request {words.printable(explanation.request_id)}, placement {explanation.placement_id}",
        f"Model {words.printable(explanation.model)}   Tenant {words.printable(explanation.tenant) or 'the default'}",
        f"Decodes on {words.printable(explanation.decode)}, prefilled "
        + (f"by {words.printable(explanation.prefill)}" if explanation.prefill else "there"),
        f"Prompt {words.count(explanation.prompt_tokens)} tokens, {words.count(expected)} expected in caches",
    ]
    result = explanation.result
    if result is None:
        lines.append("It is still running; its times are known when it ends.")
    else:
        end = "its worker failed" if result.worker_failed else f"{words.count(result.cached_tokens)} found in caches"
        lines.append(f"Output {words.count(result.output_tokens)} tokens; {end}")
        if result.times is not None:
            lines += ["", *_timeline(result.times)]
    lines += ["", *_alternatives(explanation), "", *_evidence(explanation, width)]
    return [line[:width].rstrip() for line in lines]


def _timeline(times: Times) -> list[str]:
    scheduled = times.place + times.queue
    first = times.first_token if times.first_token is not None else scheduled + times.prefill
    bars = [
        ("place", 0.0, times.place, ""),
        ("queue", times.place, times.queue, ""),
        ("prefill", scheduled, max(0.0, first - scheduled), "until the first token"),
        ("decode", first, times.decode, f"{words.duration(times.itl)} a token" if times.itl else ""),
    ]
    if times.transfer:
        note = f"{words.size(times.transfer_bytes)}, {words.bandwidth(times.transfer_bytes / times.transfer)}"
        bars.insert(3, ("transfer", scheduled, times.transfer, note))
    total = max(start + seconds for _, start, seconds, _ in bars)
    return [
        f"  {name:<9}|{words.span(start, seconds, total, _LANE)}| {words.duration(seconds):>10}  {note}"
        for name, start, seconds, note in bars
    ]


def _alternatives(explanation: Explanation) -> list[str]:
    lines = ["Why here: seconds of delay that each way would have added; the first was taken"]
    for way in explanation.ways[:_MOST_WAYS]:
        where = f"{words.printable(way.prefill)} > {words.printable(way.decode)}" if way.prefill else way.decode
        lines.append(f"  {cut(where, 36):<36} {words.duration(way.total):>10}  {_costs(way.costs)}")
    if len(explanation.ways) > _MOST_WAYS:
        lines.append(f"  and {len(explanation.ways) - _MOST_WAYS} more")
    return lines


def _costs(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {words.duration(seconds)}" for kind, seconds in costs.items())


def _evidence(explanation: Explanation, width: int) -> list[str]:
    lines = ["What was known"]
    for one in explanation.evidence:
        if one.refusal:
            text = f"not considered: {words.printable(one.refusal)}"
        else:
            text = (
                f"cached {words.count(one.cached_tokens)}, requests {one.num_requests}, waiting {one.num_waiting}, "
                f"backlog {words.duration(one.backlog)}, prefill {words.rate(one.prefill_tokens_per_second)}"
            )
        lines.append(f"  {cut(words.printable(one.worker_id), 24):<24} {text}")
    return lines


def _percentiles(parts: Percentiles | None) -> str:
    if parts is None:
        return words.NOTHING
    return f"p50 {words.duration(parts.p50)}, p90 {words.duration(parts.p90)}, p99 {words.duration(parts.p99)}"


def _trouble(fleet: FleetSight) -> str:
    parts = [
        f"{words.rate(value)} {what}"
        for value, what in ((fleet.refusals_per_second, "refused"), (fleet.failures_per_second, "failed"))
        if value
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _n(value: float | None) -> float:
    return -1.0 if value is None else value
