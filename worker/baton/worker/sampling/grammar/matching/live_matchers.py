"""The matchers of all running requests, and the memory that they take together. Used by several threads."""

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

_CHECK_SECONDS = 0.05  # between two looks at the process's memory: an automaton grows by 12 MB in that time
_WEIGHED_CPU_SECONDS = 0.004  # of one match between two reports: 1 MB at most


class LiveMatchers:
    """Ends a request where the matchers hold more than `max_bytes`: in its own estimate, and in the process's memory.

    The estimates are upper bounds that may be 10 times too high. They decide which request ends, the process's memory
    decides whether one does.
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
        self._before = 0  # bytes of the process when the first of those that live was added
        self._next_check = 0.0

    @property
    def num_bytes(self) -> int:
        """What all may hold, those left out that are to end."""
        with self._lock:
            return self._sum(ending=False)

    def add(self, match: GrammarMatch, matcher: LLMatcher, num_bytes: int) -> None:
        """Counts a match before it is opened with this matcher. `num_bytes` is what its compilation holds."""
        work = reported_work(matcher)
        with self._lock:
            if match.abandoned:
                return
            if not self._of:
                self._before = self._measure()
            self._of[match] = _Live(Holding(match.payer, num_bytes), num_bytes, work or Work())
            self._enforce()

    def charge(self, match: GrammarMatch, cpu_seconds: float) -> int:
        """Counts what a step took, in the thread that took it. Returns the bytes that the matcher may have grown by."""
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
        """Forgets a match whose request ended. Idempotent."""
        with self._lock:
            self._of.pop(match, None)

    def _sum(self, ending: bool) -> int:
        return sum(live.holding.num_bytes for match, live in self._of.items() if (match.ending is not None) is ending)

    def _enforce(self) -> None:
        if self._sum(ending=False) <= self._max_bytes or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + _CHECK_SECONDS
        # What is to end is freed with its request.
        measured = self._measure() - self._before - self._sum(ending=True)
        if measured <= self._max_bytes:
            return
        going_on = {id(live.holding): match for match, live in self._of.items() if match.ending is None}
        ended = to_end(self._of[match].holding for match in going_on.values())
        assert ended is not None, "some hold too much"
        match = going_on[id(ended)]
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
