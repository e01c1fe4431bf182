"""The cost of a placement in seconds of added delay, for the request itself and for those it meets. Pure functions.

A second between tokens costs less than one before the first token, by `WorkerSnapshot.stream_part`.

Costs are computed from the workers' states, their measured rates, and the placements in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.router.placement.worker_snapshot import NO_TRAFFIC, Demand, Traffic, WorkerSnapshot

# submit, started, accept, first token, complete: the cost of a hand-over that moves no KV
_HANDOVER_SECONDS = 0.002
_MOST_GROWTH = 0.8  # of steps with their batch: beyond it a queue grows, not the batch


class Costs(NamedTuple):
    """Seconds, one field for each router.proto CostKind."""

    queue: float
    prefill: float
    transfer: float
    decode: float
    memory: float
    restore: float = 0.0
    adapter: float = 0.0
    later: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def to_first_token(self) -> float:
        """The part before the first token."""
        return self.queue + self.prefill + self.transfer + self.restore + self.adapter


def decode_alone(decode: WorkerSnapshot, demand: Demand, floor_seconds: float) -> Costs:
    """Returns the cost of decoding alone. `floor_seconds` is the fastest step of any worker."""
    step = decode.rates.step
    beside, num_output_tokens = decode.num_beside, demand.num_output_tokens
    context = demand.num_prompt_tokens + num_output_tokens / 2
    own = num_output_tokens * max(0.0, decode.step_seconds(demand) - floor_seconds)
    # The others are half through, on average.
    others = beside * (step.slope + step.context_slope * context) * num_output_tokens / 2
    return Costs(
        _seat_seconds(decode, demand),
        0.0,
        0.0,
        (own + others * echo(decode, demand)) * decode.stream_part(demand),
        _memory_seconds(decode, demand),
        0.0,
        decode.adapter_seconds(demand) if demand.adapter else 0.0,
    )


def local(decode: WorkerSnapshot, demand: Demand, alone: Costs, traffic: Traffic = NO_TRAFFIC) -> Costs:
    """Returns the cost if the decode worker prefills, which delays its batch."""
    prefill = decode.prefill_seconds(demand) * traffic.bias
    restore = decode.restore_seconds() if decode.num_host_tokens else 0.0
    return Costs(
        max(alone.queue, decode.backlog_seconds),
        prefill,
        0.0,
        alone.decode + _stall_seconds(decode, decode.num_beside, prefill, demand),
        alone.memory,
        restore,
        alone.adapter,
        _later_seconds(decode, prefill, traffic),
    )


def remote(
    decode: WorkerSnapshot, prefill: WorkerSnapshot, demand: Demand, alone: Costs, traffic: Traffic = NO_TRAFFIC
) -> Costs:
    """Returns the cost if another worker prefills and sends the KV while it computes."""
    seconds = prefill.prefill_seconds(demand) * traffic.remote_bias
    moving = moving_seconds(decode, demand)
    # Layers go as they are computed: the last one cannot hide, and neither can what takes longer than the prefill.
    exposed = max(moving - seconds, moving / max(1, decode.view.num_layers))
    restore = prefill.restore_seconds() + max(0.0, decode.restore_seconds() - seconds)
    return Costs(
        # Prompts that the decode worker computes itself go before what others have computed for it.
        max(alone.queue, prefill.backlog_seconds, decode.backlog_seconds - seconds),
        seconds,
        exposed + _HANDOVER_SECONDS,
        alone.decode + _stall_seconds(prefill, prefill.num_stalled, seconds, demand),
        alone.memory,
        restore,
        max(alone.adapter, prefill.adapter_seconds(demand)),
        _later_seconds(prefill, seconds, traffic),
    )


class Screened(NamedTuple):
    """The total costs of all decode workers."""

    totals: list[float]  # of local, for each
    # What each adds at least to a remote prefill, its transfer and hand-over included: with its queue, and without.
    queued: list[float]
    alone: list[float]
    stalls: list[float]  # seconds that its streams feel of each one that it prefills


def screen(decodes: Sequence[WorkerSnapshot], demand: Demand, floor_seconds: float, traffic: Traffic) -> Screened:
    """Returns the totals of `local` for every worker.

    Computed in one pass, because every placement needs the whole fleet.
    """
    prompt, output, adapter = demand.num_prompt_tokens, demand.num_output_tokens, demand.adapter
    num_choices = demand.num_choices
    strained = demand.itl_seconds > 0
    part = demand.stream_part / demand.itl_seconds if strained else demand.stream_part
    half = output / 2
    context = prompt + half
    bias, arrivals = traffic.bias, traffic.placements_per_second
    totals: list[float] = []
    queued: list[float] = []
    without: list[float] = []
    stalls: list[float] = []
    for one in decodes:
        view, rates, cached, requests, beside, _, coming, backlog, host, behind, _, _, stalled = one
        step, block_size, speed = rates.step, view.block_size or 1, rates.prefill_tokens_per_second
        uncached = prompt - cached
        prefill = (uncached if uncached > 1 else 1) / speed * bias
        own_step = step.base + step.slope * (beside + 1) + step.context_slope * (view.num_context_tokens + context)
        felt = part * own_step / (1.0 - stalled) if strained else part
        alone = stall = 0.0
        if beside:
            slowed = beside * (step.slope + step.context_slope * context)
            growth = slowed / own_step
            echoed = 1.0 / (1.0 - (growth if growth < _MOST_GROWTH else _MOST_GROWTH))
            alone = slowed * half * echoed
            stall = beside * felt * echoed
        if own_step > floor_seconds:
            alone += output * (own_step - floor_seconds)
        alone *= felt
        missing = (uncached + output + beside * half) / block_size + coming - view.num_free_blocks
        if missing > 0 and view.num_blocks:  # without blocks, nothing is kept
            alone += missing * block_size / speed
        if adapter:
            alone += one.adapter_seconds(demand)
        excess = requests + num_choices - behind - view.max_num_requests
        queue = excess * seconds_per_seat(one, demand) if excess > 0 else 0.0
        lacking = uncached if uncached > 0 else 0
        num_bytes = view.moved_bytes(lacking) if view.kv_parts else lacking * view.kv_bytes_per_token
        moving = num_bytes / rates.transfer_bytes_per_second
        there = alone + moving / (view.num_layers or 1) + _HANDOVER_SECONDS
        without.append(there)
        queued.append(there + queue)
        stalls.append(stall)
        later = prefill * (arrivals * (backlog + prefill / 2) + behind)
        total = (queue if queue > backlog else backlog) + prefill * (1 + stall) + alone + later
        totals.append(total + one.restore_seconds() if host else total)
    return Screened(totals, queued, without, stalls)


class RemoteBounds(NamedTuple):
    """Lower bounds of the cost of prefilling at each worker, for any decode worker: with its queue, and without."""

    queued: list[float]
    work: list[float]
    seconds: list[float]  # of the prefill alone


def remote_bounds(
    prefills: Sequence[WorkerSnapshot], demand: Demand, traffic: Traffic, stalls: Sequence[float] | None = None
) -> RemoteBounds:
    """Returns bounds for every prefill worker, in one pass. `stalls`: those of `screen`, if it had the same workers."""
    prompt, bias, arrivals = demand.num_prompt_tokens, traffic.remote_bias, traffic.placements_per_second
    if stalls is None:
        stalls = [_stall_seconds(one, one.num_stalled, 1.0, demand) for one in prefills]
    queued: list[float] = []
    work: list[float] = []
    alone: list[float] = []
    for one, stall in zip(prefills, stalls, strict=True):
        uncached, backlog = prompt - one.num_cached_tokens, one.backlog_seconds
        seconds = (uncached if uncached > 1 else 1) / one.rates.prefill_tokens_per_second * bias
        there = seconds * (1.0 + stall + arrivals * (backlog + seconds / 2) + one.num_behind)
        alone.append(seconds)
        work.append(there)
        queued.append(backlog + there)
    return RemoteBounds(queued, work, alone)


def not_hidden(decode: WorkerSnapshot, moving: float, backlog: float, prefill: float) -> float:
    """Returns the seconds by which a pair exceeds the bounds of its two sides.

    That happens if the prefill, behind its backlog, ends before the transfer or before the decode worker's own prompts.
    """
    exposed = moving - prefill - moving / max(1, decode.view.num_layers)
    waits = decode.backlog_seconds - prefill - backlog
    return (exposed if exposed > 0 else 0.0) + (waits if waits > 0 else 0.0)


def echo(one: WorkerSnapshot, demand: Demand) -> float:
    """Returns the factor by which a batch's delay grows.

    Streams that stay longer slow later ones, which then stay longer too.
    """
    step = one.rates.step
    context = demand.num_prompt_tokens + demand.num_output_tokens / 2
    growth = one.num_beside * (step.slope + step.context_slope * context) / one.step_seconds(demand)
    return 1.0 / (1.0 - min(growth, _MOST_GROWTH))


def least_transfer(decode: WorkerSnapshot, demand: Demand) -> float:
    """Returns a lower bound of a hand-over's cost to a decode worker, for any prefill worker."""
    return moving_seconds(decode, demand) / max(1, decode.view.num_layers) + _HANDOVER_SECONDS


def moving_seconds(decode: WorkerSnapshot, demand: Demand) -> float:
    """Returns the seconds to send the KV that the decode worker lacks, if none of it were hidden."""
    num_tokens = max(0, demand.num_prompt_tokens - decode.num_cached_tokens)
    return decode.view.moved_bytes(num_tokens) / decode.rates.transfer_bytes_per_second


def seconds_per_seat(decode: WorkerSnapshot, demand: Demand) -> float:
    """Returns the mean seconds between free seats in a full batch."""
    seats = max(1, decode.view.max_num_requests)
    step = decode.rates.step.seconds(seats, decode.view.num_context_tokens)
    return demand.num_output_tokens * step / seats


def _later_seconds(one: WorkerSnapshot, work: float, traffic: Traffic) -> float:
    """Returns the delay of waiting requests that this one overtakes, and of those expected until it is computed."""
    coming = traffic.placements_per_second * (one.backlog_seconds + work / 2)
    return work * (coming + one.num_behind)


def _stall_seconds(one: WorkerSnapshot, num_stalled: int, seconds: float, demand: Demand) -> float:
    """Returns the delay of streams that stall during a prefill."""
    return num_stalled * seconds * echo(one, demand) * one.stream_part(demand) if num_stalled else 0.0


def _seat_seconds(decode: WorkerSnapshot, demand: Demand) -> float:
    excess = decode.num_requests + demand.num_choices - decode.num_behind - decode.view.max_num_requests
    return excess * seconds_per_seat(decode, demand) if excess > 0 else 0.0


def _memory_seconds(decode: WorkerSnapshot, demand: Demand) -> float:
    """Returns the delay of preempting and recomputing the blocks that will be missing once the batch has grown."""
    view = decode.view
    block_size = view.block_size or 1
    own = demand.num_prompt_tokens - decode.num_cached_tokens + demand.num_output_tokens
    growth = decode.num_beside * demand.num_output_tokens / 2
    missing = (own + growth) / block_size + decode.num_coming_blocks - view.num_free_blocks
    return missing * block_size / decode.rates.prefill_tokens_per_second if missing > 0 else 0.0
