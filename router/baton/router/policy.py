"""The choice: every way to run a request, costed, the cheapest first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router import costs
from baton.router.costs import Costs
from baton.router.standing import NO_TRAFFIC, Demand, Standing, Traffic

# With many workers only the best of each side are paired.
_PAIRED_DECODES = 4
_PAIRED_PREFILLS = 4
_LOCALS = 3  # of which the parts of the cost are told


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
    complete: bool = False,
) -> list[Option]:
    """The options, best first. Between equals the session wins, then `rotation`, a growing number, decides.

    Unless `complete`, only the best ones: pairs that cannot win, whatever the transfer takes, are left out.
    """
    if not decodes:
        return []
    floor = min([one.rates.step.base + one.rates.step.slope for one in decodes])
    totals, least_alone = costs.screen(decodes, demand, floor, traffic)
    count = len(decodes)
    order = [
        (total, -1 if one.is_preferred else (place - rotation) % count, place)
        for place, (total, one) in enumerate(zip(totals, decodes, strict=True))
    ]
    order.sort()
    decider = _Decider(decodes, prefills, demand, floor, rotation, traffic)
    options = [decider.local(place, turn) for _, turn, place in (order if complete else order[:_LOCALS])]
    if prefills:
        leasts = costs.least_remotes(prefills, demand, traffic)
        best = math.inf if complete else options[0].total
        if min(leasts) + least_alone <= best:
            options += decider.pairs(leasts, best)
    # Not disaggregating needs one worker less: it wins between equals.
    options.sort(key=lambda option: (option.total, option.prefill is not None, option.turn))
    return options


@dataclass(frozen=True, slots=True)
class _Decider:
    """One decision's values, for the options that are costed in full."""

    decodes: Sequence[Standing]
    prefills: Sequence[Standing]
    demand: Demand
    floor: float
    rotation: int
    traffic: Traffic

    def local(self, place: int, turn: int) -> Option:
        """A decode worker prefills itself."""
        decode = self.decodes[place]
        alone = costs.decode_alone(decode, self.demand, self.floor)
        cost = costs.local(decode, self.demand, alone, self.traffic)
        return Option(decode, None, cost, sum(cost), turn)

    def pairs(self, leasts: Sequence[float], best: float) -> list[Option]:
        """Two stages: each side is ranked by what it costs on its own, then the first are paired while they may win.

        `leasts`: of each prefill worker. `best`: the total that a pair must not exceed; infinite: all first ones.
        """
        count = len(leasts)
        order = sorted(range(count), key=lambda place: (leasts[place], (place - self.rotation) % count))
        options: list[Option] = []
        for side in self._sides()[:_PAIRED_DECODES]:
            num_paired = 0
            for place in order:
                if num_paired == _PAIRED_PREFILLS or leasts[place] + side.least > best:
                    break
                prefill = self.prefills[place]
                if _fit(side.decode, prefill):
                    num_paired += 1
                    cost = costs.remote(side.decode, prefill, self.demand, side.alone, self.traffic)
                    options.append(Option(side.decode, prefill, cost, sum(cost), side.turn))
                    best = best if best == math.inf else min(best, options[-1].total)
        return options

    def _sides(self) -> list[_Side]:
        sides, count = [], len(self.decodes)
        for place, decode in enumerate(self.decodes):
            alone = costs.decode_alone(decode, self.demand, self.floor)
            least = sum(alone) - alone.queue + costs.least_transfer(decode, self.demand)
            turn = -1 if decode.is_preferred else (place - self.rotation) % count
            sides.append(_Side(least, turn, decode, alone))
        return sorted(sides, key=lambda one: (one.least + one.alone.queue, one.turn))


class _Side(NamedTuple):
    """A decode worker that waits for a partner."""

    least: float  # seconds of every pair with it, beside what the prefill worker costs
    turn: int
    decode: Standing
    alone: Costs


def _fit(decode: Standing, prefill: Standing) -> bool:
    return prefill.view.worker_id != decode.view.worker_id and prefill.view.layout == decode.view.layout
