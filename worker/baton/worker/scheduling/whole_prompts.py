"""Gives requests rows and steps where nothing is cached: a prompt is computed whole, in one step, without blocks.

Prompts join a step while its tokens last. The first one of a step may exceed them: it is then alone. Tenants take turns
by the tokens that they have used, regardless of how many each has waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.worker.core import RowInit
from baton.worker.requests.outputs import EngineCounters
from baton.worker.requests.state import Line, Phase, Rank, RequestState
from baton.worker.scheduling.background import Background
from baton.worker.scheduling.queues import RequestQueues
from baton.worker.scheduling.steps.draft import Draft
from baton.worker.scheduling.tenants.shares import TenantClock


class Prompts(Protocol):
    """Decides which prompts a step computes."""

    def may_lease(self, state: RequestState) -> bool:
        """Returns whether blocks may be leased for a remote prefill now."""

    def begin_step(self) -> None:
        """Begins a step."""

    def prefill(self, draft: Draft) -> None:
        """Gives prompts rows and tokens of the step."""


class WholePrompts:
    """Implements Prompts."""

    def __init__(
        self, queues: RequestQueues, background: Background, counters: EngineCounters, clock: Callable[[], float]
    ) -> None:
        self._queues = queues
        self._batch = queues.batch
        self._background = background
        self._counters = counters
        self._clock = clock
        self._tenants = TenantClock()

    def may_lease(self, state: RequestState) -> bool:
        """Returns False: there are no blocks."""
        return False

    def begin_step(self) -> None:
        self._background.begin_step()

    def prefill(self, draft: Draft) -> None:
        """Admits prompts until one does not fit into the step."""
        while self._batch.num_free_rows and (state := self._next()) is not None:
            num_tokens = len(state.token_ids)
            if num_tokens > draft.budget and draft.chunks:
                return
            self._start(state, draft)
            self._background.take(state, num_tokens)
            self._tenants.charge(state.request.tenant, num_tokens)
            draft.chunks[state] = num_tokens
            draft.budget = max(0, draft.budget - num_tokens)

    def _next(self) -> RequestState | None:
        """Returns the most urgent request of the tenant that has used the least."""
        waiting = self._queues.waiting
        lines = waiting.lines
        if len(lines) == 1:  # the usual case, without an order
            self._tenants.reset()
            lone = waiting.front(lines[0])
            return None if lone is None or self._background.waits(lone) else lone
        fronts = {line: state for line in lines if (state := waiting.front(line)) is not None}
        ready = {line: state for line, state in fronts.items() if not self._background.waits(state)}
        if not ready:
            return None
        if len({line.tenant for line in fronts}) < 2:
            self._tenants.reset()
        else:
            self._tenants.advance({line.tenant for line in fronts})
        return min(ready.items(), key=self._order)[1]

    def _order(self, front: tuple[Line, RequestState]) -> tuple[int, float, Rank]:
        line, state = front
        return line.priority, self._tenants.used(line.tenant), state.rank

    def _start(self, state: RequestState, draft: Draft) -> None:
        """Gives the request a row."""
        self._queues.waiting.discard(state)
        state.phase = Phase.RUNNING
        num_tokens = len(state.token_ids)
        if state.started is None:
            state.started = self._clock()
            self._counters.count_prompt(num_tokens, 0)
        row = self._batch.add(state, 0, num_tokens)
        request = state.request
        draft.admitted[row] = RowInit(
            row,
            request.token_ids.array(),
            request.num_prompt_tokens,
            request.sampling,
            request.pooling,
            adapter_slot=state.adapter_slot,
        )
        self._queues.stalled = False
        self._background.start(state)
