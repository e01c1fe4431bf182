"""Compiled grammars, kept while there is room. Used by several threads; knows no request and no engine."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from baton.rpc.errors import InvalidRequest
from baton.worker.core import Constraint
from baton.worker.grammar.source import field_of, grammar_of
from baton.worker.grammar.vocabulary import Vocabulary

_MAX_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiled grammars may cost."""

    max_cached: int = 256
    max_cached_bytes: int = 8 << 20  # of the constraints' own texts
    max_cached_seconds: float = 3600.0  # since the last use
    max_lexer_fuel: int = 1_000_000  # of a compilation; about 50 k a millisecond
    max_grammar_size: int = 200_000  # symbols
    max_step_fuel: int = 200_000  # of one token's mask; about 14 k a millisecond
    max_row_items: int = 20_000  # ways to read one token
    max_step_items: int = 50_000  # of one token's mask; about 20 k a millisecond
    max_lexer_states: int = 20_000  # 1 to 2 kB each, of every running request


@dataclass(slots=True)
class _Entry:
    matcher: LLMatcher
    num_bytes: int
    used: float


class Compiler:
    """Makes matchers. Equal constraints of one owner share one compilation while it is kept.

    Of another owner's nobody could tell by the time that it takes whether it was compiled before.
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
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[bytes, Constraint], _Entry] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def matcher(self, constraint: Constraint, owner: bytes = b"") -> LLMatcher:
        """A matcher at the answer's start, for the caller alone. Raises InvalidRequest that names the field.

        `owner`: who may share it; a request's cache namespace.
        """
        key = (owner, constraint)
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is not None:
                entry.used = self._clock()
                self._entries.move_to_end(key)
                return entry.matcher.deep_copy()
        matcher = self._compile(constraint)
        copy = matcher.deep_copy()
        self._keep(key, matcher)
        return copy

    def _compile(self, constraint: Constraint) -> LLMatcher:
        grammar = grammar_of_checked(constraint)
        limits = self.limits
        matcher = LLMatcher(
            self.vocabulary.tokenizer,
            grammar,
            log_level=0,
            limits=LLParserLimits(
                max_items_in_row=limits.max_row_items,
                initial_lexer_fuel=limits.max_lexer_fuel,
                max_grammar_size=limits.max_grammar_size,
                step_lexer_fuel=limits.max_step_fuel,
                step_max_items=limits.max_step_items,
                max_lexer_states=limits.max_lexer_states,
                verbose_errors=False,
            ),
        )
        self.num_compiled += 1
        if not matcher.is_error():
            # The first mask is made once for all copies, and shows grammars that are too expensive from the start.
            scratch = np.empty(self.vocabulary.num_words, np.int32)
            matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        if matcher.is_error():
            raise refusal(constraint, matcher.get_error())
        return matcher

    def _keep(self, key: tuple[bytes, Constraint], matcher: LLMatcher) -> None:
        constraint = key[1]
        num_bytes = len(constraint.text) + sum(map(len, constraint.choices))
        limits = self.limits
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = _Entry(matcher, num_bytes, self._clock())
            self._num_bytes += num_bytes
            while len(self._entries) > limits.max_cached or self._num_bytes > limits.max_cached_bytes:
                self._drop_oldest()

    def _expire(self) -> None:
        oldest = self._clock() - self.limits.max_cached_seconds
        while self._entries and next(iter(self._entries.values())).used < oldest:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._num_bytes -= entry.num_bytes


def grammar_of_checked(constraint: Constraint) -> str:
    """As grammar_of, with the library's own refusals as InvalidRequest."""
    try:
        return grammar_of(constraint)
    except ValueError as error:
        raise refusal(constraint, str(error)) from error


def refusal(constraint: Constraint, problem: str) -> InvalidRequest:
    """What the library said of a constraint, for the client."""
    field = field_of(constraint)
    line = " ".join(problem.split())
    shown = line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " ..."
    return InvalidRequest(f"{field}: {shown}", field=field)
