"""How tenants share the prefill tokens of steps that several of them want. Moves no block and starts no request.

A step's tokens are divided between the tenants that have used the least, whatever each of them has waiting: a short
prompt waits for one step, not for all that another tenant submitted. What one leaves over goes to the others. Where a
request finds no room, others may pass it until they have used as much as it would have used by then.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from itertools import groupby

from baton.worker.requests.state import NO_ROW, Line, RequestState
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.step_draft import Draft

# Tenants among which one step is divided: with more of them, chunks would be too short to be computed well.
_SHARERS = 4


class Admission(enum.Enum):
    """What came of the attempt to admit a request."""

    DONE = "it runs, or waits elsewhere"
    NOT_YET = "it lacks what comes by itself: a mask, or the tokens of a step in flight"
    NO_ROOM = "it lacks a row or blocks"
    HELD = "it lacks blocks that are pinned: nobody may pass it"


class TenantClock:
    """What each tenant has used. Who comes, or comes back, starts as the one that has used least."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._now = 0.0  # the least that a tenant with prompts has used

    def __len__(self) -> int:
        return len(self._used)

    def used(self, tenant: str) -> float:
        """In tokens, since the tenants began to share."""
        return max(self._now, self._used.get(tenant, 0.0))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant used this much more."""
        if num_tokens:
            self._used[tenant] = self.used(tenant) + num_tokens

    def advance(self, tenants: Iterable[str]) -> None:
        """These are all that have prompts now."""
        self._now = min([self.used(tenant) for tenant in tenants], default=self._now)
        self._used = {tenant: used for tenant, used in self._used.items() if used > self._now}

    def reset(self) -> None:
        """Nobody shares."""
        if self._used:
            self._used.clear()
            self._now = 0.0


class TenantShares:
    """Divides the rest of a step's tokens, by priority first."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._clock = TenantClock()

    def wanted(self) -> bool:
        """Whether several tenants have prompts. Where not, the order of ranks is all there is."""
        tenants = {state.request.tenant for state in self._queues.batch.prefilling}
        tenants.update([line.tenant for line in self._queues.waiting.lines])
        if len(tenants) < 2:
            self._clock.reset()
            return False
        self._clock.advance(tenants)
        return True

    def divide(
        self,
        draft: Draft,
        go_on: Callable[[RequestState, Draft], None],
        admit: Callable[[RequestState, Draft], Admission] | None,
    ) -> None:
        """Spends draft.budget. `admit` None: nothing new is admitted in this step."""
        step = _Step(self._queues, self._clock, draft, go_on, admit)
        lines = {state.line for state in self._queues.batch.prefilling} | set(self._queues.waiting.lines)
        for _, group in groupby(sorted(lines, key=lambda line: line.priority), lambda line: line.priority):
            step.divide(sorted(group, key=self._order))
            if draft.budget <= 0:
                return
            step.end_priority()

    def _order(self, line: Line) -> tuple[float, tuple[int, float, int]]:
        ranks = [state.rank for state in self._queues.batch.prefilling if state.line == line]
        if not ranks and (front := self._queues.waiting.front(line)) is not None:
            ranks = [front.rank]
        return self._clock.used(line.tenant), min(ranks, default=(line.priority, 0.0, 0))


class _Step:
    """One step's division."""

    def __init__(
        self,
        queues: RequestQueues,
        clock: TenantClock,
        draft: Draft,
        go_on: Callable[[RequestState, Draft], None],
        admit: Callable[[RequestState, Draft], Admission] | None,
    ) -> None:
        self._queues = queues
        self._clock = clock
        self._draft = draft
        self._go_on = go_on
        self._admit = admit
        self._waits: set[Line] = set()  # nothing more of it is admitted in this step
        self._pass_until = float("inf")  # what a tenant may have used that passes requests without room

    def end_priority(self) -> None:
        """Less urgent requests pass none that found no room. Those that run go on: they may be what it waits for."""
        if self._pass_until < float("inf"):
            self._admit = None

    def divide(self, lines: list[Line]) -> None:
        """Serves lines of one priority: an even part each, then what is left."""
        sharers = lines[:_SHARERS]
        for index, line in enumerate(sharers):
            self._serve(line, -(-self._draft.budget // (len(sharers) - index)))
        for line in lines:
            self._serve(line, self._draft.budget)

    def _serve(self, line: Line, most: int) -> None:
        draft = self._draft
        if most <= 0:
            return
        kept, draft.budget = draft.budget - most, most
        for state in list(self._queues.batch.prefilling):
            if state.line == line and state.row != NO_ROW and draft.budget > 0:
                self._go_on(state, draft)
        # Admitting may take blocks from less urgent requests; their chunks' tokens are lost to this step.
        self._admit_some(line)
        self._clock.charge(line.tenant, most - draft.budget)
        draft.budget += kept

    def _admit_some(self, line: Line) -> None:
        draft = self._draft
        while self._admit is not None and line not in self._waits and draft.budget > 0:
            state = self._queues.waiting.front(line)
            if state is None or self._clock.used(line.tenant) >= self._pass_until:
                return
            outcome = self._admit(state, draft)
            if outcome is Admission.DONE:
                continue
            self._waits.add(line)
            if outcome is Admission.NO_ROOM:
                until = self._clock.used(line.tenant) + len(state.token_ids)
                self._pass_until = min(self._pass_until, until)
            elif outcome is Admission.HELD:
                self._pass_until = float("-inf")
