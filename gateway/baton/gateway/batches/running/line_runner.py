"""Runs lines of one batch in places of the window, and repeats those that found no room. Knows no store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from baton.gateway.access.identity import Identity
from baton.gateway.batches.running.line_call import Handler, LineAnswer, call
from baton.gateway.batches.running.lines import Line, LineRequest, request_of
from baton.gateway.batches.running.results import LineResult, answered
from baton.gateway.batches.running.window import Window
from baton.gateway.metrics.batches import BatchCounters

_MAX_WAIT_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.125
_MAX_FAILURES = 3  # attempts of a line that fails by a defect
_FAILURE = 500


class LineRunner:
    """Runs lines; results go to `on_result`."""

    def __init__(
        self,
        window: Window,
        batch_id: str,
        endpoint: str,
        handler: Handler,
        identity: Identity,
        on_result: Callable[[LineResult], None],
        counters: BatchCounters,
    ) -> None:
        self._window = window
        self._batch_id = batch_id
        self._endpoint = endpoint
        self._handler = handler
        self._identity = identity
        self._tenant = identity.tenant.name
        self._on_result = on_result
        self._counters = counters
        self._limited_until = 0.0  # when the tenant's limits have room again, by time.monotonic

    async def enter(self) -> None:
        """Waits for a place of one line."""
        await asyncio.sleep(max(0.0, self._limited_until - time.monotonic()))
        await self._window.enter(self._tenant)

    async def run(self, line: Line) -> None:
        """Runs a line that has a place, and gives the place back."""
        holds_place, served = True, False
        request = request_of(line.data, (self._endpoint,))
        num_failures = num_refusals = 0
        try:
            while True:
                answer = await call(self._handler, self._endpoint, request.body, self._identity, self._batch_id)
                self._counters.refused_lines += answer.is_refusal
                if answer.is_limited:
                    holds_place = False
                    self._window.leave(self._tenant, served=False)
                    self._limited_until = time.monotonic() + _spread(answer)
                    await self.enter()
                    holds_place = True
                elif answer.is_refusal:
                    # It is asked again when there is a place, which the window gives while the fleet takes lines.
                    num_refusals += 1
                    again = time.monotonic() + min(_spread(answer), _FIRST_WAIT_SECONDS * 2**num_refusals)
                    holds_place = False
                    self._window.refused(self._tenant)
                    await self._window.enter(self._tenant, again=True)
                    holds_place = True
                    await asyncio.sleep(max(0.0, again - time.monotonic()))
                elif answer.status == _FAILURE and (num_failures := num_failures + 1) < _MAX_FAILURES:
                    await asyncio.sleep(_spread(answer))
                else:
                    break
            served = True
            self._record(line, request, answer)
        finally:
            if holds_place:
                self._window.leave(self._tenant, served)

    def _record(self, line: Line, request: LineRequest, answer: LineAnswer) -> None:
        self._on_result(answered(line.index, request.custom_id, answer))


def _spread(answer: LineAnswer) -> float:
    """Returns how long to wait, so that lines that were refused together do not return together."""
    return min(_MAX_WAIT_SECONDS, max(0.05, answer.retry_seconds)) * random.uniform(0.75, 1.25)
