"""The choice: every way to run a request, costed, the cheapest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from baton.router import costs
from baton.router.costs import Costs
from baton.router.standing import NO_TRAFFIC, Demand, Standing, Traffic

# With many workers only the best of each side are paired.
_PAIRED_DECODES = 4
_PAIRED_PREFILLS = 4


class Option(NamedTuple):
    """One way to run a request."""

    decode: Standing
    prefill: Standing | None  # None: the decode worker prefills
    costs: Costs
    total: float  # seconds
    turn: int  # between equals the lowest wins


def rank(
    decodes: Sequence[Standing],
    prefills: Sequence[Standing],
    demand: Demand,
    rotation: int = 0,
    traffic: Traffic = NO_TRAFFIC,
) -> list[Option]:
    """The options, best first. Between equals the session wins, then `rotation`, a growing number, decides."""
    if not decodes:
        return []
    floor = min([one.rates.step.base + one.rates.step.slope for one in decodes])
    count = len(decodes)
    sides: list[_Side] = []
    options: list[Option] = []
    for place, decode in enumerate(decodes):
        base = costs.decode_alone(decode, demand, floor)
        cost = costs.local(decode, demand, base, traffic)
        turn = -1 if decode.is_preferred else (place - rotation) % count
        options.append(Option(decode, None, cost, sum(cost), turn))
        if prefills:
            sides.append(_Side(sum(base) + costs.moving_seconds(decode, demand), turn, decode, base))
    if prefills:
        options += _pairs(options, sides, prefills, demand, rotation, traffic)
    # Not disaggregating needs one worker less: it wins between equals.
    options.sort(key=_order)
    return options


class _Side(NamedTuple):
    """A decode worker that waits for a partner."""

    seconds: float
    turn: int
    decode: Standing
    base: Costs


def _order(option: Option) -> tuple[float, bool, int]:
    return option.total, option.prefill is not None, option.turn


def _pairs(
    local: Sequence[Option],
    sides: list[_Side],
    prefills: Sequence[Standing],
    demand: Demand,
    rotation: int,
    traffic: Traffic,
) -> list[Option]:
    """Two stages: each side is ranked by what it costs on its own, then the best are paired.

    A pair that cannot win, whatever the transfer takes, is left out, but for the first one: it is evidence.
    """
    sides.sort(key=itemgetter(0, 1))
    count = len(prefills)
    least = [
        (costs.least_remote(one, demand, traffic), (place - rotation) % count) for place, one in enumerate(prefills)
    ]
    order = sorted(range(count), key=least.__getitem__)
    best = min([one.total for one in local])
    options: list[Option] = []
    for _, turn, decode, base in sides[:_PAIRED_DECODES]:
        alone = sum(base) - base.queue + costs.least_transfer(decode, demand)
        num_paired = 0
        for place in order:
            if num_paired == _PAIRED_PREFILLS or (options and least[place][0] + alone > best):
                break
            prefill = prefills[place]
            if _fit(decode, prefill):
                num_paired += 1
                cost = costs.remote(decode, prefill, demand, base, traffic)
                options.append(Option(decode, prefill, cost, sum(cost), turn))
                best = min(best, options[-1].total)
    return options


def _fit(decode: Standing, prefill: Standing) -> bool:
    return prefill.view.worker_id != decode.view.worker_id and prefill.view.layout == decode.view.layout
