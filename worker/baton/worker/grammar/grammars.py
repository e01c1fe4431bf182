"""Grammars beside the engine: compiled in threads of their own, and advanced by every sampled token off its thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor

from baton.rpc.errors import InternalError, ServiceError
from baton.worker.core import Request
from baton.worker.executor.base import ModelSpec
from baton.worker.grammar.compiler import Compiler, GrammarLimits, refusal
from baton.worker.grammar.match import GrammarMatch
from baton.worker.grammar.vocabulary import load_vocabulary

_log = logging.getLogger(__name__)

_NUM_COMPILE_THREADS = 2
_LEXER = "lexer error"  # how the library begins to tell that a limit was met while a token was taken

Batch = list[tuple[GrammarMatch, int]]


class Grammars:
    """All matches of one engine. Every method is called from the engine's thread.

    `wake` is called, from any thread, when a compilation has ended; None: nobody sleeps.
    """

    def __init__(
        self, find_folder: Callable[[], Path], model: ModelSpec, num_threads: int, limits: GrammarLimits | None = None
    ) -> None:
        self.wake: Callable[[], None] | None = None
        self.num_compiling = 0
        self.num_advancing = 0
        self._find_folder = find_folder
        self._model = model
        self._limits = limits or GrammarLimits()
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._compilations = ThreadPoolExecutor(_NUM_COMPILE_THREADS, "grammar-compile")
        self._unsent: Batch = []
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, list[GrammarMatch]]] = queue.SimpleQueue()
        self._advancer: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """Whether a match is on its way."""
        return self.num_compiling > 0 or self.num_advancing > 0

    def open(self, request: Request, owner: object) -> GrammarMatch:
        """Compiles the request's constraint in the background."""
        match = GrammarMatch(request, owner)
        self.num_compiling += 1
        self._compilations.submit(self._open, match)
        return match

    def advance(self, match: GrammarMatch, token_id: int) -> None:
        """Takes an output token. Begun by the next `send`."""
        match.ready = False
        self._unsent.append((match, token_id))
        self.num_advancing += 1

    def send(self) -> None:
        """Begins what was asked for since the last call, all at once."""
        if not self._unsent:
            return
        if self._advancer is None:
            self._advancer = threading.Thread(target=self._run, name="grammar-advance", daemon=True)
            self._advancer.start()
        batch, self._unsent = self._unsent, []
        self._batches.put(batch)

    def settle(self, seconds: float) -> list[GrammarMatch]:
        """The matches that have become ready. Waits so long for all that advance or, where none do, for any."""
        self.send()
        found: list[GrammarMatch] = []
        until = time.monotonic() + seconds
        while self.pending:
            patience = until - time.monotonic() if self.num_advancing or not found else 0.0
            try:
                compiled, matches = self._results.get(patience > 0, max(patience, 0.0))
            except queue.Empty:
                break
            if compiled:
                self.num_compiling -= len(matches)
            else:
                self.num_advancing -= len(matches)
            found += matches
        for match in found:
            match.ready = True
        return found

    def close(self) -> None:
        """Ends the threads; what is pending is lost. Idempotent."""
        self._compilations.shutdown(wait=False, cancel_futures=True)
        self._batches.put(None)

    # In the threads.

    def _open(self, match: GrammarMatch) -> None:
        try:
            match.open(self._make_compiler())
            match.fill()
        except ServiceError as error:
            match.error = error
        except Exception as error:  # nothing that a grammar does may end the thread
            match.error = _as_internal(error)
        self._results.put((True, [match]))
        if self.wake is not None:
            self.wake()

    def _make_compiler(self) -> Compiler:
        """Reads the tokenizer on first use; tries again after a failure."""
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(load_vocabulary(self._find_folder(), self._model), self._limits)
            return self._compiler

    def _run(self) -> None:
        pool = LLExecutor(self._num_threads)
        while (batch := self._batches.get()) is not None:
            try:
                self._advance(pool, batch)
            except Exception as error:
                for match, _ in batch:
                    match.error = match.error or _as_internal(error)
            self._results.put((False, [match for match, _ in batch]))

    def _advance(self, pool: LLExecutor, batch: Batch) -> None:
        """Tokens in, masks out, on several cores."""
        reasoning = [(match, token_id) for match, token_id in batch if match.matcher is None]
        inside = [(match, token_id, match.matcher) for match, token_id in batch if match.matcher is not None]
        # The pool refuses to be asked for nothing, as where all that are in a step reason.
        taken = pool.consume_token_par([(matcher, token_id) for _, token_id, matcher in inside]) if inside else []
        for (match, token_id, _), was_taken in zip(inside, taken, strict=True):
            match.count()
            if not was_taken:
                match.error = _not_taken(match, token_id)
        for match, token_id in reasoning:
            if match.consume([token_id]):
                match.fill()
            else:
                match.error = _not_taken(match, token_id)
        going_on = [(match, matcher) for match, _, matcher in inside if match.error is None]
        asking = [(match, matcher) for match, matcher in going_on if not matcher.is_stopped()]
        if asking:
            masks = np.empty((len(asking), self._num_words), np.int32)
            columns = [(matcher, index) for index, (_, matcher) in enumerate(asking)]
            pool.unsafe_compute_mask_ptr(columns, masks.ctypes.data, masks.shape[1] * 4, len(asking))
            for (match, _), words in zip(asking, masks, strict=True):
                match.fill(words)
        for match, matcher in going_on:
            if matcher.is_stopped():
                match.fill()

    @property
    def _num_words(self) -> int:
        assert self._compiler is not None, "a match was opened"
        return self._compiler.vocabulary.num_words


def _not_taken(match: GrammarMatch, token_id: int) -> ServiceError:
    """Why a token of the mask was not taken: the grammar has grown too large on the way, or there is a defect."""
    problem = match.matcher.get_error() if match.matcher is not None and match.matcher.is_error() else ""
    if problem.startswith(_LEXER):
        return refusal(match.constraint, problem)
    return InternalError(f"token {token_id} was drawn against its constraint")


def _as_internal(error: Exception) -> InternalError:
    _log.error("a grammar failed", exc_info=error)
    return InternalError(f"the grammar failed ({type(error).__name__})")
