"""The matchers of all running requests, and their total memory. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llguidance import LLMatcher

from baton.rpc.errors import InvalidRequest
from baton.worker.sampling.grammar.compilation.wording import SIMPLER
from baton.worker.sampling.grammar.matching.match import GrammarMatch
from baton.worker.sampling.grammar.matching.memory_budget import Holding, to_end
from baton.worker.sampling.grammar.matching.memory_usage import Work, grown_bytes, reported_work
from baton.worker.sampling.grammar.process_memory import allocated_bytes
from baton.worker.sampling.grammar.translation.constraint import field_of

_CHECK_SECONDS = 0.05  # between measurements of the process; an automaton grows by 12 MB in that time
_WEIGHED_CPU_SECONDS = 0.004  # of one match between two reports; it grows by 1 MB at most


class LiveMatchers:
    """Ends a request when the matchers exceed `max_bytes`, both as estimated and as measured in the process.

    Estimates are upper bounds that may be 10 times too high. They decide which request ends; the measurement decides
    whether one does.
    """

    def __init__(
        self,
        max_bytes: int,
        measure: Callable[[], int] = allocated_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._measure = measure
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[GrammarMatch, _Live] = {}
        self._before = 0  # bytes of the process when the first of the current matchers was added
        self._next_check = 0.0

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all matchers, without those of ending requests."""
        with self._lock:
            return self._sum(ending=False)

    def add(self, match: GrammarMatch, matcher: LLMatcher, num_bytes: int) -> None:
        """Adds a match before it is opened with this matcher. `num_bytes` is the size of its compilation."""
        work = reported_work(matcher)
        with self._lock:
            if match.abandoned:
                return
            if not self._of:
                self._before = self._measure()
            self._of[match] = _Live(Holding(match.payer, num_bytes), num_bytes, work or Work())
            self._enforce()

    def charge(self, match: GrammarMatch, cpu_seconds: float) -> int:
        """Adds the cost of a step; called by the thread that ran it. Returns the growth of the matcher's estimate."""
        live, matcher = self._of.get(match), match.matcher
        if live is None or matcher is None:
            return 0
        live.unweighed += cpu_seconds
        if live.unweighed < _WEIGHED_CPU_SECONDS:
            return 0
        live.unweighed = 0.0
        work = reported_work(matcher)
        if work is None:
            return 0
        grown = live.compiled + grown_bytes(live.began, work) - live.holding.num_bytes
        with self._lock:
            live.holding.num_bytes += grown
            self._enforce()
        return grown

    def remove(self, match: GrammarMatch) -> None:
        """Drops the match of a request that ended. Idempotent."""
        with self._lock:
            self._of.pop(match, None)

    def _sum(self, ending: bool) -> int:
        return sum(live.holding.num_bytes for match, live in self._of.items() if (match.ending is not None) is ending)

    def _enforce(self) -> None:
        if self._sum(ending=False) <= self._max_bytes or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + _CHECK_SECONDS
        # The memory of ending requests will be freed.
        measured = self._measure() - self._before - self._sum(ending=True)
        if measured <= self._max_bytes:
            return
        running = {id(live.holding): match for match, live in self._of.items() if match.ending is None}
        ended = to_end(self._of[match].holding for match in running.values())
        assert ended is not None, "some hold too much"
        match = running[id(ended)]
        match.ending = self._error(match, measured)

    def _error(self, match: GrammarMatch, measured: int) -> InvalidRequest:
        field = field_of(match.constraint)
        return InvalidRequest(
            f"{field}: the automata of all running constraints take {measured >> 20} MiB; at most"
            f" {self._max_bytes >> 20} MiB are allowed, and this one is the largest of its tenant's; {SIMPLER}",
            field=field,
        )


class _Live:
    def __init__(self, holding: Holding, compiled: int, began: Work) -> None:
        self.holding = holding
        self.compiled = compiled
        self.began = began
        self.unweighed = 0.0
