"""A cache of compiled grammars. Thread-safe. Knows no requests and no engine."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from baton.worker.core import Constraint
from baton.worker.sampling.grammar.compilation.compile import compile_grammar, grammar_of_checked
from baton.worker.sampling.grammar.compilation.cost import estimated_bytes
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.vocabulary import Vocabulary


@dataclass(slots=True)
class _Entry:
    matcher: LLMatcher
    num_bytes: int
    used: float
    num_grown: int = 0  # bytes that matchers of this compilation may have added


class Compiler:
    """Creates matchers. Equal constraints of one owner share a cached compilation.

    Owners do not share compilations, because the time to first token would reveal another owner's constraints.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: GrammarLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or GrammarLimits()
        self.num_compiled = 0
        self.num_hits = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[bytes, Constraint], _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Upper bound of the cache's memory."""
        return self._num_bytes

    def cached(self, constraint: Constraint, owner: bytes) -> LLMatcher | None:
        """Returns a matcher of a cached compilation; None without one."""
        with self._lock:
            self._expire()
            entry = self._entries.get((owner, constraint))
            if entry is None:
                return None
            self.num_hits += 1
            entry.used = self._clock()
            self._entries.move_to_end((owner, constraint))
            return entry.matcher.deep_copy()

    def matcher(
        self, constraint: Constraint, owner: bytes = b"", grammar: str | None = None, num_bytes: int | None = None
    ) -> LLMatcher:
        """Returns a new matcher at the answer's start. Raises InvalidRequest with the field.

        `owner` is a request's cache namespace. `grammar` and `num_bytes` are a trial's results; None if it is plain.
        """
        cached = self.cached(constraint, owner)
        if cached is not None:
            return cached
        text = grammar_of_checked(constraint) if grammar is None else grammar
        plain = num_bytes is None
        matcher = compile_grammar(self.vocabulary, constraint, text, self.limits, plain)
        copy = matcher.deep_copy()
        with self._lock:
            self.num_compiled += 1
            size = estimated_bytes(constraint) if num_bytes is None else num_bytes
            self._keep((owner, constraint), _Entry(matcher, size, self._clock()))
        return copy

    def held_bytes(self, constraint: Constraint, owner: bytes) -> int:
        """Returns an upper bound of the bytes of a cached compilation."""
        with self._lock:
            entry = self._entries.get((owner, constraint))
        return estimated_bytes(constraint) if entry is None else entry.num_bytes + entry.num_grown

    def grow(self, constraint: Constraint, owner: bytes, num_bytes: int) -> None:
        """Adds the growth of a matcher to its compilation, which all copies share.

        Drops a compilation that grew too much. Running matchers keep it alive; new ones get a new compilation.
        """
        with self._lock:
            entry = self._entries.get((owner, constraint)) if num_bytes else None
            if entry is None:
                return
            entry.num_grown += num_bytes
            self._num_bytes += num_bytes
            if entry.num_grown > self.limits.max_grown_bytes:
                self._drop((owner, constraint))
            self._evict()

    def drop(self, constraint: Constraint, owner: bytes) -> None:
        """Drops a compilation after one of its matchers failed."""
        with self._lock:
            if (owner, constraint) in self._entries:
                self._drop((owner, constraint))

    def _keep(self, key: tuple[bytes, Constraint], entry: _Entry) -> None:
        if key not in self._entries:
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
            self._evict()

    def _evict(self) -> None:
        limits = self.limits
        while len(self._entries) > limits.max_cached or self._num_bytes > limits.max_cached_bytes:
            self._drop(next(iter(self._entries)))

    def _expire(self) -> None:
        oldest = self._clock() - self.limits.max_cached_seconds
        while self._entries and next(iter(self._entries.values())).used < oldest:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[bytes, Constraint]) -> None:
        entry = self._entries.pop(key)
        self._num_bytes -= entry.num_bytes + entry.num_grown
