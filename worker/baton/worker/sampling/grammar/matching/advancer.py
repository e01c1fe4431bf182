"""A thread that advances matches by sampled tokens and computes their next masks, on several cores."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from baton.rpc.errors import InternalError, ServiceError
from baton.worker.sampling.grammar.matching.match import GrammarMatch

SLOW_SECONDS = 0.01  # of a batch
_log = logging.getLogger(__name__)

Batch = list[tuple[GrammarMatch, list[int]]]


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of one batch, from its tokens to its masks."""

    seconds: float
    cpu_seconds: float  # per match, on average
    alone: bool  # the batch had one match
    num_tokens: int = 1  # of the match that was alone


class Advancer:
    """Advances the matches of one lane. After a slow batch, advances each match alone once, to find the slow ones.

    `report` is called from the thread with the matches and the cost of a batch.
    """

    def __init__(self, name: str, num_threads: int, report: Callable[[list[GrammarMatch], BatchCost], None]) -> None:
        self._name = name
        self._num_threads = num_threads
        self._report = report
        self._unsent: dict[GrammarMatch, list[int]] = {}
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, match: GrammarMatch, token_id: int) -> None:
        """Adds an output token to the next batch, behind those of the match that are in it."""
        self._unsent.setdefault(match, []).append(token_id)

    def send(self) -> None:
        """Starts the batch of all tokens since the last call."""
        if not self._unsent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._batches.put(list(self._unsent.items()))
        self._unsent = {}

    def close(self) -> None:
        """Ends the thread. Pending batches are lost."""
        self._batches.put(None)

    # Called by the thread.

    def _run(self) -> None:
        pool = LLExecutor(self._num_threads)
        apart = False
        while (batch := self._batches.get()) is not None:
            parts = [[one] for one in batch] if apart else [batch]
            slowest = max(self._take(pool, part) for part in parts)
            apart = not apart and slowest > SLOW_SECONDS
            del batch, parts  # frees the large matchers of requests that have ended

    def _take(self, pool: LLExecutor, batch: Batch) -> float:
        """Returns the seconds that the batch took."""
        began, cpu_began = time.monotonic(), time.thread_time()
        try:
            _advance(pool, batch)
        except Exception as error:
            for match, _ in batch:
                match.error = match.error or as_internal(error)
        seconds = time.monotonic() - began
        # One match is advanced by this thread, several by the pool's threads.
        alone = len(batch) == 1
        all_seconds = time.thread_time() - cpu_began if alone else seconds * min(self._num_threads, len(batch))
        cost = BatchCost(seconds, all_seconds / len(batch), alone, len(batch[0][1]))
        self._report([match for match, _ in batch], cost)
        return seconds


def as_internal(error: BaseException) -> InternalError:
    """Logs a defect. Returns its error."""
    _log.error("a grammar failed", exc_info=error)
    return InternalError(f"the grammar failed ({type(error).__name__})")


def _advance(pool: LLExecutor, batch: Batch) -> None:
    """Consumes the tokens of a batch and fills the masks of its matches."""
    alone: Batch = []  # matches in reasoning, with several tokens, or whose token is an added token to be spelled
    inside: list[tuple[GrammarMatch, int, LLMatcher]] = []
    for match, token_ids in batch:
        matcher = match.matcher
        if match.ending is not None:
            match.error = match.ending
        elif matcher is None or len(token_ids) > 1 or match.is_spelled(token_ids[0]):
            alone.append((match, token_ids))
        else:
            inside.append((match, token_ids[0], matcher))
    # The pool rejects an empty list, as when all matches of a step are in reasoning.
    taken = pool.consume_token_par([(matcher, token_id) for _, token_id, matcher in inside]) if inside else []
    for (match, token_id, _), was_taken in zip(inside, taken, strict=True):
        match.count()
        if not was_taken:
            match.error = _not_taken(match, [token_id])
    for match, token_ids in alone:
        if match.consume(token_ids):
            match.fill()
        else:
            match.error = _not_taken(match, token_ids)
    continuing = [(match, matcher) for match, _, matcher in inside if match.error is None]
    unfinished = [(match, matcher) for match, matcher in continuing if not matcher.is_stopped()]
    if unfinished:
        masks = np.empty((len(unfinished), unfinished[0][0].num_words), np.int32)
        columns = [(matcher, index) for index, (_, matcher) in enumerate(unfinished)]
        pool.unsafe_compute_mask_ptr(columns, masks.ctypes.data, masks.shape[1] * 4, len(unfinished))
        for (match, _), words in zip(unfinished, masks, strict=True):
            match.fill(words)
    for match, matcher in continuing:
        if matcher.is_stopped():
            match.fill()


def _not_taken(match: GrammarMatch, token_ids: list[int]) -> ServiceError:
    """Returns the error for rejected tokens: the grammar reached a limit, or there is a defect."""
    drawn = ", ".join(map(str, token_ids))
    return match.limit_error() or InternalError(f"token {drawn} was drawn against its constraint")
