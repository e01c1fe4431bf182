"""A thread that advances matches by sampled tokens and makes their next masks, on several cores."""

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

Batch = list[tuple[GrammarMatch, int]]


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What one batch took, from its tokens to its masks."""

    seconds: float
    cpu_seconds: float  # of each match, as if all took the same
    alone: bool  # it had one match


class Advancer:
    """One lane of masks. After a slow batch each match is advanced alone once, which shows the slow ones.

    `report` is called from the thread with a batch's matches, and what they cost.
    """

    def __init__(self, name: str, num_threads: int, report: Callable[[list[GrammarMatch], BatchCost], None]) -> None:
        self._name = name
        self._num_threads = num_threads
        self._report = report
        self._unsent: Batch = []
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, match: GrammarMatch, token_id: int) -> None:
        """Takes an output token. Begun by the next `send`."""
        self._unsent.append((match, token_id))

    def send(self) -> None:
        """Begins what was added since the last call, all at once."""
        if not self._unsent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        batch, self._unsent = self._unsent, []
        self._batches.put(batch)

    def close(self) -> None:
        """Ends the thread; what is pending is lost."""
        self._batches.put(None)

    # In the thread.

    def _run(self) -> None:
        pool = LLExecutor(self._num_threads)
        apart = False
        while (batch := self._batches.get()) is not None:
            parts = [[one] for one in batch] if apart else [batch]
            slowest = max(self._take(pool, part) for part in parts)
            apart = not apart and slowest > SLOW_SECONDS
            del batch, parts  # a matcher of a request that has ended is large

    def _take(self, pool: LLExecutor, batch: Batch) -> float:
        """Returns the seconds that the batch took."""
        began, cpu_began = time.monotonic(), time.thread_time()
        try:
            _advance(pool, batch)
        except Exception as error:
            for match, _ in batch:
                match.error = match.error or as_internal(error)
        seconds = time.monotonic() - began
        # One match is advanced in this thread, several are advanced in the pool's.
        alone = len(batch) == 1
        all_seconds = time.thread_time() - cpu_began if alone else seconds * min(self._num_threads, len(batch))
        self._report([match for match, _ in batch], BatchCost(seconds, all_seconds / len(batch), alone))
        return seconds


def as_internal(error: BaseException) -> InternalError:
    """Returns the error of a defect, which is logged."""
    _log.error("a grammar failed", exc_info=error)
    return InternalError(f"the grammar failed ({type(error).__name__})")


def _advance(pool: LLExecutor, batch: Batch) -> None:
    """Tokens in, masks out."""
    alone: Batch = []  # that reason, or whose token stands for others
    inside: list[tuple[GrammarMatch, int, LLMatcher]] = []
    for match, token_id in batch:
        matcher = match.matcher
        if match.ending is not None:
            match.error = match.ending
        elif matcher is None or match.is_spelled(token_id):
            alone.append((match, token_id))
        else:
            inside.append((match, token_id, matcher))
    # The pool refuses an empty list, as where all matches of a step reason.
    taken = pool.consume_token_par([(matcher, token_id) for _, token_id, matcher in inside]) if inside else []
    for (match, token_id, _), was_taken in zip(inside, taken, strict=True):
        match.count()
        if not was_taken:
            match.error = _not_taken(match, token_id)
    for match, token_id in alone:
        if match.consume([token_id]):
            match.fill()
        else:
            match.error = _not_taken(match, token_id)
    going_on = [(match, matcher) for match, _, matcher in inside if match.error is None]
    asking = [(match, matcher) for match, matcher in going_on if not matcher.is_stopped()]
    if asking:
        masks = np.empty((len(asking), asking[0][0].num_words), np.int32)
        columns = [(matcher, index) for index, (_, matcher) in enumerate(asking)]
        pool.unsafe_compute_mask_ptr(columns, masks.ctypes.data, masks.shape[1] * 4, len(asking))
        for (match, _), words in zip(asking, masks, strict=True):
            match.fill(words)
    for match, matcher in going_on:
        if matcher.is_stopped():
            match.fill()


def _not_taken(match: GrammarMatch, token_id: int) -> ServiceError:
    """Why a token of the mask was not taken: the grammar has grown too large on the way, or there is a defect."""
    return match.limit_error() or InternalError(f"token {token_id} was drawn against its constraint")
