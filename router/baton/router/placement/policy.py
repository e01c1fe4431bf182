"""The choice: every way to run a request, costed, the cheapest first. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.router.placement import costs
from baton.router.placement.costs import Costs, RemoteBounds, Screened
from baton.router.placement.worker_snapshot import NO_TRAFFIC, Demand, Traffic, WorkerSnapshot

# With many workers only the best of each side are paired.
_PAIRED_DECODES = 4
_PAIRED_PREFILLS = 4
_LOCALS = 2  # options whose costs are reported in parts
_EQUAL = 1.0 - 1e-9  # sums of the same parts, added in another order


class Option(NamedTuple):
    """One way to run a request."""

    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None  # None: the decode worker prefills
    costs: Costs
    total: float  # seconds
    tie_rank: int  # between equals the lowest wins

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that need not be computed."""
        there = self.decode.num_cached_tokens
        return there if self.prefill is None else max(there, self.prefill.num_cached_tokens)


def rank(
    decodes: Sequence[WorkerSnapshot],
    prefills: Sequence[WorkerSnapshot],
    demand: Demand,
    rotation: int = 0,
    traffic: Traffic = NO_TRAFFIC,
    complete: bool = False,
    spare: bool = True,
) -> list[Option]:
    """Returns the options, best first. Ties go to the session's worker, then by `rotation`, a growing number.

    Unless `complete`, leaves out pairs that cannot win for any transfer time. Without `spare` only the first option is
    used, so others may be left out for speed.
    """
    if not decodes:
        return []
    floor = min([one.rates.step.base + one.rates.step.slope for one in decodes])
    screened = costs.screen(decodes, demand, floor, traffic)
    decider = _Decider(decodes, prefills, demand, floor, rotation, traffic, spare or complete)
    totals = screened.totals
    if spare or complete:
        indices = sorted(range(len(totals)), key=lambda index: (totals[index], decider.tie_rank(index)))
        del indices[len(totals) if complete else _LOCALS :]
    else:
        least = min(totals)
        indices = [min((index for index, total in enumerate(totals) if total == least), key=decider.tie_rank)]
    options = list(map(decider.local, indices))
    if prefills:
        stalls = screened.stalls if prefills is decodes else None
        bounds = costs.remote_bounds(prefills, demand, traffic, stalls)
        best = math.inf if complete else options[0].total
        if max(min(bounds.queued) + min(screened.alone), min(bounds.work) + min(screened.queued)) <= best:
            options += decider.pairs(screened, bounds, best)
    # Not disaggregating needs one worker less: it wins between equals.
    options.sort(key=lambda option: (option.total, option.prefill is not None, option.tie_rank))
    return options


@dataclass(slots=True)
class _Decider:
    """One decision's values, for the options that are costed in full."""

    decodes: Sequence[WorkerSnapshot]
    prefills: Sequence[WorkerSnapshot]
    demand: Demand
    floor: float
    rotation: int
    traffic: Traffic
    spare: bool

    def tie_rank(self, index: int) -> int:
        """Returns a decode worker's rank among equal costs: the lowest wins."""
        return -1 if self.decodes[index].is_preferred else (index - self.rotation) % len(self.decodes)

    def local(self, index: int) -> Option:
        """Returns the option in which a decode worker prefills."""
        decode = self.decodes[index]
        alone = costs.decode_alone(decode, self.demand, self.floor)
        cost = costs.local(decode, self.demand, alone, self.traffic)
        return Option(decode, None, cost, sum(cost), self.tie_rank(index))

    def pairs(self, screened: Screened, bounds: RemoteBounds, best: float) -> list[Option]:
        """Ranks each side by its own cost, then pairs the best while a pair may still win.

        `best`: the total that a pair must not exceed; infinite: all pairs of the first ones.
        """
        count, least_work, least_alone = len(bounds.work), min(bounds.work), min(screened.alone)
        sides = [
            (seconds, self.tie_rank(index), index)
            for index, seconds in enumerate(screened.queued)
            if seconds + least_work <= best
        ]
        partners = [
            (seconds, (index - self.rotation) % count, index)
            for index, seconds in enumerate(bounds.queued)
            if seconds + least_alone <= best
        ]
        sides.sort()
        partners.sort()
        options: list[Option] = []
        for _, tie_rank, side in sides[:_PAIRED_DECODES]:
            decode, alone = self.decodes[side], None
            moving = costs.moving_seconds(decode, self.demand)
            num_paired = 0
            for bound, _, index in partners:
                least = bound + screened.alone[side]
                # Bounds are met where a prompt's transfer hides: between equals the first one stays.
                if num_paired == _PAIRED_PREFILLS or least >= best * _EQUAL:
                    break
                prefill = self.prefills[index]
                if _fit(decode, prefill):
                    num_paired += 1
                    if not self.spare:
                        # Mostly all that the bounds leave out: it is quicker than a pair's costs.
                        least += costs.not_hidden(decode, moving, prefill.backlog_seconds, bounds.seconds[index])
                        if least >= best * _EQUAL:
                            continue
                    alone = alone or costs.decode_alone(decode, self.demand, self.floor)
                    cost = costs.remote(decode, prefill, self.demand, alone, self.traffic)
                    options.append(Option(decode, prefill, cost, sum(cost), tie_rank))
                    best = best if best == math.inf else min(best, options[-1].total)
        return options


def _fit(decode: WorkerSnapshot, prefill: WorkerSnapshot) -> bool:
    return prefill.view.worker_id != decode.view.worker_id and prefill.view.layout == decode.view.layout
