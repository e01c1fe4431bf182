"""The choice: every way to run a request, costed, the cheapest first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.router import costs
from baton.router.costs import Costs, Demand, Standing

# With many workers only the best of each side are paired.
_PAIRED_DECODES = 4
_PAIRED_PREFILLS = 4


class Option(NamedTuple):
    """One way to run a request."""

    decode: Standing
    prefill: Standing | None  # None: the decode worker prefills
    costs: Costs
    total: float  # seconds


def rank(decodes: Sequence[Standing], prefills: Sequence[Standing], demand: Demand, rotation: int = 0) -> list[Option]:
    """The options, best first. Between equals `rotation`, a number that grows, takes turns."""
    if not decodes:
        return []
    floor = min(decode.rates.step.seconds(1) for decode in decodes)
    alone = [costs.decode_alone(decode, demand, floor) for decode in decodes]
    options = [
        _option(decode, None, costs.local(decode, demand, base)) for decode, base in zip(decodes, alone, strict=True)
    ]
    turns = _turns(decodes, rotation)
    options += _pairs(list(zip(decodes, alone, strict=True)), prefills, demand, turns, rotation)
    # Not disaggregating needs one worker less: it wins between equals.
    options.sort(key=lambda option: (option.total, option.prefill is not None, turns[option.decode.view.worker_id]))
    return options


def _pairs(
    decodes: Sequence[tuple[Standing, Costs]],
    prefills: Sequence[Standing],
    demand: Demand,
    turns: Mapping[str, int],
    rotation: int,
) -> list[Option]:
    """Two stages: each side is ranked by what it costs on its own, then the best are paired."""
    if not prefills:
        return []
    by_decode = sorted(
        decodes,
        key=lambda pair: (pair[1].total + _moving_seconds(pair[0], demand), turns[pair[0].view.worker_id]),
    )
    prefill_turns = _turns(prefills, rotation)
    by_prefill = sorted(
        prefills,
        key=lambda one: (
            one.backlog_seconds + one.prefill_seconds(demand),
            prefill_turns[one.view.worker_id],
        ),
    )
    options: list[Option] = []
    for decode, base in by_decode[:_PAIRED_DECODES]:
        fitting = (prefill for prefill in by_prefill if _fit(decode, prefill))
        for prefill, _ in zip(fitting, range(_PAIRED_PREFILLS), strict=False):
            options.append(_option(decode, prefill, costs.remote(decode, prefill, demand, base)))
    return options


def _option(decode: Standing, prefill: Standing | None, cost: Costs) -> Option:
    return Option(decode, prefill, cost, cost.total)


def _fit(decode: Standing, prefill: Standing) -> bool:
    return prefill.view.worker_id != decode.view.worker_id and prefill.view.layout == decode.view.layout


def _moving_seconds(decode: Standing, demand: Demand) -> float:
    num_tokens = max(0, demand.num_prompt_tokens - decode.num_cached_tokens)
    return num_tokens * decode.view.kv_bytes_per_token / decode.rates.transfer_bytes_per_second


def _turns(standings: Sequence[Standing], rotation: int) -> dict[str, int]:
    count = len(standings)
    return {standing.view.worker_id: (place - rotation) % count for place, standing in enumerate(standings)}
