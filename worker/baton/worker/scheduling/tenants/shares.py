"""Divides the prefill tokens of a step between tenants. Moves no block and starts no request.

The tokens go to the tenants that have used the least, regardless of how much each has waiting: a short prompt waits for
one step, not for all that another tenant submitted. Tokens that one tenant leaves over go to the others. If a request
finds no capacity, others may pass it until they have used as much as it would have used by then.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from itertools import groupby

from baton.worker.requests.state import NO_ROW, Line, RequestState
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.steps.draft import Draft

# Tenants among which one step is divided. With more, chunks would be too short to be efficient.
_SHARERS = 4


class Admission(enum.Enum):
    """The result of an attempt to admit a request."""

    DONE = "it runs, or waits elsewhere"
    NOT_YET = "it waits for a mask, or for the tokens of a step in flight"
    NO_CAPACITY = "there is no row, or no block"
    HELD = "the blocks that it needs are pinned: no request may pass it"


class TenantClock:
    """The tokens that each tenant has used. A tenant that is new or returns starts at the least that any has used."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._now = 0.0  # the least that a tenant with prompts has used

    def __len__(self) -> int:
        return len(self._used)

    def used(self, tenant: str) -> float:
        """Returns the tokens used since the tenants began to share."""
        return max(self._now, self._used.get(tenant, 0.0))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Adds tokens that the tenant used."""
        if num_tokens:
            self._used[tenant] = self.used(tenant) + num_tokens

    def advance(self, tenants: Iterable[str]) -> None:
        """Sets the tenants that have prompts now."""
        self._now = min([self.used(tenant) for tenant in tenants], default=self._now)
        self._used = {tenant: used for tenant, used in self._used.items() if used > self._now}

    def reset(self) -> None:
        """Ends the sharing."""
        if self._used:
            self._used.clear()
            self._now = 0.0


class TenantShares:
    """Divides the rest of a step's tokens, by priority first."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._clock = TenantClock()

    def wanted(self) -> bool:
        """Returns whether several tenants have prompts. If not, the order of ranks decides."""
        tenants = {state.request.tenant for state in self._queues.batch.prefilling}
        tenants.update([line.tenant for line in self._queues.waiting.lines])
        if len(tenants) < 2:
            self._clock.reset()
            return False
        self._clock.advance(tenants)
        return True

    def reset(self) -> None:
        """Ends the sharing: no tenant has prompts."""
        self._clock.reset()

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
    """The division of one step."""

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
        self._waits: set[Line] = set()  # lines of which nothing more is admitted in this step
        self._pass_until = float("inf")  # tenants that used no more than this may pass requests without capacity

    def end_priority(self) -> None:
        """Ends a priority.

        Less urgent requests may not pass one without capacity; running ones continue, as it may need them.
        """
        if self._pass_until < float("inf"):
            self._admit = None

    def divide(self, lines: list[Line]) -> None:
        """Serves lines of one priority: an even part each, then the rest."""
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
        # Admission may preempt less urgent requests; the tokens of their chunks are lost to this step.
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
            if outcome is Admission.NO_CAPACITY:
                until = self._clock.used(line.tenant) + len(state.token_ids)
                self._pass_until = min(self._pass_until, until)
            elif outcome is Admission.HELD:
                self._pass_until = float("-inf")
