"""One decision: the workers that may take the request, the cost of each option, and the best or a refusal. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.router.placement import filter as filters
from baton.router.placement.costs import seconds_per_seat
from baton.router.placement.fair_share import (
    BACKGROUND_PART,
    exceeds_share,
    is_below_share,
    queue_bound,
    wait_pressure,
)
from baton.router.placement.policy import Option, rank
from baton.router.placement.promises import Promises, promise_of
from baton.router.placement.worker_snapshot import NO_TRAFFIC, Demand, Objectives, Traffic, WorkerSnapshot
from baton.router.requests.in_flight import TenantLoad
from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.v1 import types_pb2

_RETRY_SECONDS = (0.1, 10.0)


class Asked(NamedTuple):
    """A request, as far as its place depends on it."""

    model: types_pb2.ModelInfo
    demand: Demand
    tenant: str = ""
    tenant_weight: float = 1.0
    priority: int = 0
    timeout_seconds: float = 0.0  # 0: none

    @property
    def num_tokens(self) -> int:
        """Returns the tokens that count for the tenant: prompt and expected output."""
        return self.demand.num_prompt_tokens + int(self.demand.num_output_tokens)


def decide(
    asked: Asked,
    snapshots: Sequence[WorkerSnapshot],
    tenants: Mapping[str, TenantLoad],
    max_queue_depth: int,
    rotation: int = 0,
    traffic: Traffic = NO_TRAFFIC,
    spare: bool = True,
    how_full: float = 0.0,
) -> list[Option]:
    """Returns the options, the chosen one first. `snapshots` are usable workers, of which at least one decodes.

    Without `spare` only the first option is needed. `how_full`: the queues, lately, in [0, 1]. Raises InvalidRequest if
    no pool can ever hold the prompt; NoCapacity if queues are full, the tenant exceeds its share of full queues, or no
    option meets the time limit.
    """
    demand = asked.demand
    below_share = is_below_share(tenants, asked.tenant, asked.tenant_weight, asked.num_tokens)
    bound = queue_bound(max_queue_depth, asked.priority, below_share)
    decoding = [one for one in snapshots if one.view.can_decode]
    lending = [one for one in snapshots if one.view.can_prefill_for_others]
    decodes = _with_capacity(decoding, asked, bound)
    _check_share(asked, decodes, tenants, how_full)
    # One list where all do both: `rank` then looks at each worker once.
    prefills = decodes if lending == decoding else filters.with_capacity(lending, demand, bound)
    options = rank(decodes, prefills, demand, rotation, traffic, spare=spare or asked.timeout_seconds > 0)
    return _in_time(options, asked) if asked.timeout_seconds else options


def admitted(
    options: list[Option],
    asked: Asked,
    promises: Promises,
    objectives: Objectives,
    now: Traffic,
    tenants: Mapping[str, TenantLoad],
) -> list[Option]:
    """Moves the first option that adds good streams to the front.

    Raises NoCapacity if the wait of every option exceeds the objective, if the tenant has its share of a fleet with
    waiting requests, or if each option would spoil more streams than it adds, as far as rates are measured and not
    guessed.
    """
    _check_wait(options, asked, objectives, tenants)
    for place, option in enumerate(options):
        measured = option.decode.rates.is_measured and (option.prefill or option.decode).rates.is_measured
        if (
            not measured
            or promises.gain(option.decode, option.prefill, option.costs, asked.demand, objectives, now) > 0
        ):
            return [option, *options[:place], *options[place + 1 :]] if place else options
    best = options[0]
    promise = promise_of(best.decode, best.costs, asked.demand, now)
    raise NoCapacity(
        f"it would spoil more streams than it adds: its first token would take {promise.first_token:.2f} s, and "
        f"{1000 * promise.between:.0f} ms would pass between tokens",
        phase=types_pb2.PHASE_PLACEMENT,
        retry_after_ms=_retry_ms(max(1.0, best.costs.queue)),
    )


def _check_wait(
    options: Sequence[Option], asked: Asked, objectives: Objectives, tenants: Mapping[str, TenantLoad]
) -> None:
    if not all((option.prefill or option.decode).rates.is_measured for option in options):
        return
    best = min(options, key=lambda option: option.costs.queue)
    pressure = wait_pressure(best.costs, objectives.ttft_seconds)
    retry_after_ms = _retry_ms(best.costs.queue)
    if pressure > (1.0 if asked.priority <= 0 else BACKGROUND_PART):
        raise NoCapacity(
            f"the first token would take {best.costs.to_first_token:.2f} s, {best.costs.queue:.2f} of them in a queue",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=retry_after_ms,
        )
    if exceeds_share(tenants, asked.tenant, asked.tenant_weight, asked.num_tokens, math.sqrt(pressure)):
        own = tenants[asked.tenant]
        raise NoCapacity(
            f"tenant {asked.tenant!r} has {own.num_tokens} tokens in {own.num_placements} requests, its share of a "
            f"fleet where requests wait {best.costs.queue:.2f} s",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=retry_after_ms,
        )


def candidates(
    asked: Asked, snapshots: Sequence[WorkerSnapshot], rotation: int = 0, traffic: Traffic = NO_TRAFFIC
) -> list[Option]:
    """Returns every option with a distinct cost, including full queues, best first."""
    decodes = [one for one in snapshots if one.view.can_decode]
    prefills = [one for one in snapshots if one.view.can_prefill_for_others]
    return rank(decodes, prefills, asked.demand, rotation, traffic, complete=True)


def _with_capacity(decodes: Sequence[WorkerSnapshot], asked: Asked, bound: int) -> list[WorkerSnapshot]:
    """Returns the decode workers that can take one more request. Raises NoCapacity if there is none."""
    free = filters.with_capacity(decodes, asked.demand, bound)
    if free:
        return free
    able = [one for one in decodes if filters.can_ever_hold(one, asked.demand)]
    if not able:
        largest = max(one.view.num_blocks for one in decodes) * asked.model.block_size
        raise InvalidRequest(
            f"the prompt has {asked.demand.num_prompt_tokens} tokens; the largest worker's KV pool holds {largest}",
            field="num_prompt_tokens",
        )
    raise NoCapacity(
        f"each of {len(able)} workers for model {asked.model.name!r} has {bound} requests waiting",
        phase=types_pb2.PHASE_PLACEMENT,
        retry_after_ms=_retry_ms(min(seconds_per_seat(one, asked.demand) for one in able)),
    )


def _check_share(
    asked: Asked, decodes: Sequence[WorkerSnapshot], tenants: Mapping[str, TenantLoad], how_full: float
) -> None:
    if exceeds_share(tenants, asked.tenant, asked.tenant_weight, asked.num_tokens, how_full):
        own = tenants[asked.tenant]
        raise NoCapacity(
            f"tenant {asked.tenant!r} has {own.num_tokens} tokens in {own.num_placements} requests, its share of a "
            f"fleet whose queues are {how_full:.0%} full",
            phase=types_pb2.PHASE_PLACEMENT,
            retry_after_ms=_retry_ms(min(seconds_per_seat(one, asked.demand) for one in decodes)),
        )


def _in_time(options: list[Option], asked: Asked) -> list[Option]:
    """Moves the best option that meets the time limit to the front. Raises NoCapacity if all measurably miss it."""
    limit = asked.timeout_seconds
    for place, option in enumerate(options):
        measured = (option.prefill or option.decode).rates.is_measured
        if not measured or option.costs.to_first_token <= limit:
            return [option, *options[:place], *options[place + 1 :]] if place else options
    soonest = min(option.costs.to_first_token for option in options)
    raise NoCapacity(
        f"the first token would take {soonest:.2f} s, longer than the time limit of {round(limit * 1000)} ms",
        phase=types_pb2.PHASE_PLACEMENT,
        retry_after_ms=_retry_ms(soonest - limit),
    )


def _retry_ms(seconds: float) -> int:
    shortest, longest = _RETRY_SECONDS
    return round(1000 * min(max(seconds, shortest), longest))
