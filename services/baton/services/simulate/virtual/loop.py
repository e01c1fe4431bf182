"""An asyncio event loop with virtual time: instead of waiting, it advances the time.

The chaos runs need it for the parts of the product that are coroutines: kvstore, publisher and index client.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable
from typing import Any

from baton.services.simulate.virtual.timeline import Action, Clock, Timeline


class _NoWait(selectors.SelectSelector):
    """Lets virtual time pass instead of waiting."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Fails: a task that would wait forever has lost its waker."""
        if timeout is None:
            raise RuntimeError("nothing is left to happen, and the simulation is not over")
        self._clock.now += max(0.0, timeout)
        return []  # there is no external input


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines under a clock of the simulation."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(_NoWait(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        """Returns virtual seconds."""
        return self._virtual_clock.now


class LoopTimeline(Timeline):
    """A timeline whose events are those of a virtual loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(self.clock)
        self._due = math.inf  # when the loop calls next

    def at(self, time: float, action: Action) -> None:
        """Does the same as Timeline.at. The loop does not keep the order of callbacks due at the same time."""
        super().at(time, action)
        self._schedule()

    def _schedule(self) -> None:
        if self._queue and self._queue[0][0] < self._due:
            self._due = self._queue[0][0]
            self.loop.call_at(self._due, self._fire, self._due)

    def _fire(self, due: float) -> None:
        if due != self._due:
            return  # another call took its place
        while self._queue and self._queue[0][0] <= max(due, self.clock.now):
            self.num_events += 1
            heapq.heappop(self._queue)[2]()
        self._due = math.inf
        self._schedule()

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs the loop until then, or until `done` is found true, a hundredth of a second late at most."""

        async def wait() -> None:
            while self.clock.now < until and not done():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(min(0.01, until - self.clock.now))

        self.loop.run_until_complete(wait())

    def close(self) -> None:
        """Ends what still runs."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def spawn(self, run: Any) -> asyncio.Task[None]:
        return self.loop.create_task(run)
