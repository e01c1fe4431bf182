"""The choice: every way to run a request, costed, the cheapest first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router import costs
from baton.router.costs import Costs, RemoteBounds, Screened
from baton.router.standing import NO_TRAFFIC, Demand, Standing, Traffic

# With many workers only the best of each side are paired.
_PAIRED_DECODES = 4
_PAIRED_PREFILLS = 4
_LOCALS = 2  # of which the parts of the cost are told
_EQUAL = 1.0 - 1e-9  # sums of the same parts, added in another order


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
    screened = costs.screen(decodes, demand, floor, traffic)
    count = len(decodes)
    order = [
        (total, -1 if one.is_preferred else (place - rotation) % count, place)
        for place, (total, one) in enumerate(zip(screened.totals, decodes, strict=True))
    ]
    order.sort()
    decider = _Decider(decodes, prefills, demand, floor, rotation, traffic)
    options = [decider.local(place, turn) for _, turn, place in (order if complete else order[:_LOCALS])]
    if prefills:
        bounds = costs.remote_bounds(prefills, demand, traffic)
        best = math.inf if complete else options[0].total
        if max(min(bounds.queued) + min(screened.alone), min(bounds.work) + min(screened.queued)) <= best:
            options += decider.pairs(screened, bounds, best)
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

    def pairs(self, screened: Screened, bounds: RemoteBounds, best: float) -> list[Option]:
        """Two stages: each side is ranked by what it costs on its own, then the first are paired while they may win.

        `best`: the total that a pair must not exceed; infinite: all first ones.
        """
        count, least_work, least_alone = len(bounds.work), min(bounds.work), min(screened.alone)
        sides = [
            (seconds, self._turn(place), place)
            for place, seconds in enumerate(screened.queued)
            if seconds + least_work <= best
        ]
        partners = [
            (seconds, (place - self.rotation) % count, place)
            for place, seconds in enumerate(bounds.queued)
            if seconds + least_alone <= best
        ]
        sides.sort()
        partners.sort()
        options: list[Option] = []
        for _, turn, side in sides[:_PAIRED_DECODES]:
            decode, alone = self.decodes[side], None
            num_paired = 0
            for least, _, place in partners:
                # Bounds are met where a prompt's transfer hides: between equals the first one stays.
                if num_paired == _PAIRED_PREFILLS or least + screened.alone[side] >= best * _EQUAL:
                    break
                prefill = self.prefills[place]
                if _fit(decode, prefill):
                    num_paired += 1
                    alone = alone or costs.decode_alone(decode, self.demand, self.floor)
                    cost = costs.remote(decode, prefill, self.demand, alone, self.traffic)
                    options.append(Option(decode, prefill, cost, sum(cost), turn))
                    best = best if best == math.inf else min(best, options[-1].total)
        return options

    def _turn(self, place: int) -> int:
        return -1 if self.decodes[place].is_preferred else (place - self.rotation) % len(self.decodes)


def _fit(decode: Standing, prefill: Standing) -> bool:
    return prefill.view.worker_id != decode.view.worker_id and prefill.view.layout == decode.view.layout
