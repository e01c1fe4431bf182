"""Compiled grammars, kept while there is room. Used by several threads; knows no request and no engine."""

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
    num_grown: int = 0  # bytes that matchers of this compilation may have added to it


class Compiler:
    """Makes matchers. Equal constraints of one owner share one compilation while it is kept.

    Compilations are not shared between owners: the time to a first token would show what another owner sent.
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
        """The memory of all that is kept, estimated upwards."""
        return self._num_bytes

    def cached(self, constraint: Constraint, owner: bytes) -> LLMatcher | None:
        """Returns a matcher of a compilation that is kept; None where there is none."""
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
        """Returns a matcher at the answer's start, for the caller alone. Raises InvalidRequest that names the field.

        `owner` shares it: a request's cache namespace. `grammar`, `num_bytes`: what a trial found; None: it is plain.
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
        """Returns what a compilation holds that was kept, at most."""
        with self._lock:
            entry = self._entries.get((owner, constraint))
        return estimated_bytes(constraint) if entry is None else entry.num_bytes + entry.num_grown

    def grow(self, constraint: Constraint, owner: bytes, num_bytes: int) -> None:
        """Counts what a matcher may have added to its compilation, which all its copies share.

        Drops the compilation where that is too much: running matchers keep it alive, new ones get a new one.
        """
        with self._lock:
            entry = self._entries.get((owner, constraint)) if num_bytes else None
            if entry is None:
                return
            entry.num_grown += num_bytes
            self._num_bytes += num_bytes
            if entry.num_grown > self.limits.max_grown_bytes:
                self._drop((owner, constraint))
            self._make_room()

    def drop(self, constraint: Constraint, owner: bytes) -> None:
        """Drops a compilation that failed on the way."""
        with self._lock:
            if (owner, constraint) in self._entries:
                self._drop((owner, constraint))

    def _keep(self, key: tuple[bytes, Constraint], entry: _Entry) -> None:
        if key not in self._entries:
            self._entries[key] = entry
            self._num_bytes += entry.num_bytes
            self._make_room()

    def _make_room(self) -> None:
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
