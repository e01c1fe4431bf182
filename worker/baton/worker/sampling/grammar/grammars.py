"""The grammars of an engine, compiled and advanced by other threads than the engine's.

| constraint | compiled | advanced |
| --- | --- | --- |
| plain: a small schema without patterns, a few choices | at once | in the plain lane |
| large, without patterns | from the fair queue | in the other lane |
| any other | from the fair queue, after a trial in a process that can be killed | in the other lane |
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from llguidance import LLMatcher

from baton.rpc.errors import InvalidRequest, ServiceError
from baton.worker.core import ModelSpec, Request
from baton.worker.sampling.grammar.compilation.cache import Compiler
from baton.worker.sampling.grammar.compilation.cost import MAX_KNOWN_COST, estimated_bytes, is_plain, known_cost
from baton.worker.sampling.grammar.compilation.refusals import obvious_problem
from baton.worker.sampling.grammar.fair_queue import FairQueue
from baton.worker.sampling.grammar.limits import GrammarLimits
from baton.worker.sampling.grammar.matching.advancer import SLOW_SECONDS, Advancer, BatchCost, as_internal
from baton.worker.sampling.grammar.matching.cpu_allowance import CpuAllowance
from baton.worker.sampling.grammar.matching.live_matchers import LiveMatchers
from baton.worker.sampling.grammar.matching.match import GrammarMatch, Lane
from baton.worker.sampling.grammar.stats import GrammarStats
from baton.worker.sampling.grammar.translation.constraint import field_of
from baton.worker.sampling.grammar.trial.client import TrialAbandoned, Trials, raise_problem
from baton.worker.sampling.grammar.trial.verdict import Verdict
from baton.worker.sampling.grammar.vocabulary import load_vocabulary

_log = logging.getLogger(__name__)

_NUM_PLAIN_THREADS = 2
_NUM_TRIAL_THREADS = 3


class Grammars:
    """All matches of one engine. Methods are called from the engine's thread.

    `wake` is called, from any thread, when a compilation has ended.
    """

    def __init__(
        self,
        find_folder: Callable[[], Path],
        model: ModelSpec,
        num_threads: int,
        limits: GrammarLimits | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.wake = wake
        self.num_compiling = 0
        self.num_advancing = 0
        self._find_folder = find_folder
        self._model = model
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._compilations = ThreadPoolExecutor(_NUM_PLAIN_THREADS, "grammar-compile")
        self._trials = Trials(find_folder, model, self._limits)
        self._tried: FairQueue[GrammarMatch] = FairQueue(_NUM_TRIAL_THREADS)
        self._num_refused = 0
        self._num_ended = 0
        self._trial_threads: list[threading.Thread] = []
        self._live = LiveMatchers(self._limits.max_live_bytes)
        self._verdicts = _Verdicts(self._limits.max_remembered)
        self._results: queue.SimpleQueue[tuple[bool, list[GrammarMatch]]] = queue.SimpleQueue()
        self._lanes = {
            lane: Advancer(f"grammar-advance-{lane.value}", 1 if lane is Lane.SLOW else num_threads, self._advanced)
            for lane in Lane
        }

    @property
    def pending(self) -> bool:
        """Whether a match compiles or advances."""
        return self.num_compiling > 0 or self.num_advancing > 0

    def stats(self) -> GrammarStats:
        """Returns totals and current values. May be called from any thread."""
        compiler = self._compiler
        return GrammarStats(
            num_compiled=0 if compiler is None else compiler.num_compiled,
            num_cache_hits=0 if compiler is None else compiler.num_hits,
            num_tried=self._trials.num_run,
            num_killed=self._trials.num_killed,
            num_refused=self._num_refused,
            num_ended=self._num_ended,
            num_waiting=len(self._tried),
            num_cache_bytes=0 if compiler is None else compiler.num_bytes,
            num_live_bytes=self._live.num_bytes,
        )

    def warm_up(self) -> Future[None]:
        """Reads the tokenizer and starts the trial process in the background. Requests report the failures.

        The library holds the GIL while it reads, so this should come before requests run.
        """
        return self._compilations.submit(self._warm_up)

    def open(self, request: Request, owner: object) -> GrammarMatch:
        """Compiles the request's constraint in the background."""
        match = GrammarMatch(request, owner, CpuAllowance(self._limits.max_mask_cpu_seconds))
        self.num_compiling += 1
        self._compilations.submit(self._open, match)
        return match

    def end(self, match: GrammarMatch) -> None:
        """Drops the match of a request that has ended. If it still compiles, it becomes ready nevertheless."""
        match.abandoned = True
        self._live.remove(match)
        if self._tried.remove(match.payer, match):
            self._opened(match)

    def advance(self, match: GrammarMatch, token_id: int) -> None:
        """Advances a match by an output token, from the next `send` on. Several tokens of a step are one advance."""
        self.num_advancing += match.ready
        match.ready = False
        self._lanes[match.lane].add(match, token_id)

    def send(self) -> None:
        """Starts all advances since the last call, as one batch per lane."""
        for lane in self._lanes.values():
            lane.send()

    def settle(self, seconds: float) -> list[GrammarMatch]:
        """Returns matches that became ready. Waits up to `seconds` for all that advance or, if none does, for one."""
        self.send()
        found: list[GrammarMatch] = []
        until = time.monotonic() + seconds
        while self.pending:
            remaining = until - time.monotonic() if self.num_advancing or not found else 0.0
            try:
                compiled, matches = self._results.get(remaining > 0, max(remaining, 0.0))
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
        """Ends the threads and the trial process. Pending matches are lost. Idempotent."""
        self._compilations.shutdown(wait=False, cancel_futures=True)
        self._tried.close()
        self._trials.close()
        for lane in self._lanes.values():
            lane.close()

    # Called by other threads.

    def _warm_up(self) -> None:
        try:
            self._make_compiler()
            self._trials.start()
        except (OSError, ServiceError) as error:
            _log.info("requests with constraints will be refused: %s", error)

    def _open(self, match: GrammarMatch) -> None:
        """Opens a match that is plain or cached; queues any other."""
        try:
            if not match.abandoned:
                compiler = self._make_compiler()
                match.lane = Lane.PLAIN if is_plain(match.constraint) else Lane.OTHER
                cached = compiler.cached(match.constraint, match.namespace)
                if cached is None and match.lane is Lane.OTHER:
                    self._start_trials()
                    self._tried.put(match.payer, match)
                    return
                matcher = cached or compiler.matcher(match.constraint, match.namespace)
                self._begin(match, compiler, matcher)
        except ServiceError as error:
            match.error = error
        except BaseException as error:  # the library's panics are not Exceptions, and must not end the thread
            match.error = as_internal(error)
        self._opened(match)

    def _opened(self, match: GrammarMatch) -> None:
        if isinstance(match.error, InvalidRequest):
            with self._lock:
                self._num_refused += 1
        self._results.put((True, [match]))
        if self.wake is not None:
            self.wake()

    def _start_trials(self) -> None:
        with self._lock:
            while len(self._trial_threads) < _NUM_TRIAL_THREADS:
                name = f"grammar-trial-{len(self._trial_threads)}"
                thread = threading.Thread(target=self._run_trials, name=name, daemon=True)
                self._trial_threads.append(thread)
                thread.start()

    def _run_trials(self) -> None:
        while (taken := self._tried.take()) is not None:
            self._try(*taken)
            del taken  # frees the large matcher of a request that has ended

    def _try(self, payer: bytes, match: GrammarMatch) -> None:
        try:
            if not match.abandoned:
                self._open_tried(match)
        except TrialAbandoned:
            pass
        except ServiceError as error:
            match.error = error
        except BaseException as error:
            match.error = as_internal(error)
        finally:
            self._tried.done(payer)
        self._opened(match)

    def _open_tried(self, match: GrammarMatch) -> None:
        compiler, constraint = self._make_compiler(), match.constraint
        matcher = compiler.cached(constraint, match.namespace)
        if matcher is None:
            key = _key(match)
            known = self._verdicts.get(key)
            verdict = known or self._judge(match)
            if known is None:
                # Without the grammar's text, which is converted again when there is no trial.
                self._verdicts.put(key, replace(verdict, grammar=""))
            raise_problem(constraint, verdict)
            matcher = compiler.matcher(constraint, match.namespace, verdict.grammar or None, verdict.num_bytes)
        self._begin(match, compiler, matcher)

    def _begin(self, match: GrammarMatch, compiler: Compiler, matcher: LLMatcher) -> None:
        self._live.add(match, matcher, compiler.held_bytes(match.constraint, match.namespace))
        began = time.thread_time()
        match.open(compiler.vocabulary, matcher)
        match.fill()
        self._charge(match, compiler, time.thread_time() - began)
        match.error = match.error or match.ending

    def _charge(self, match: GrammarMatch, compiler: Compiler, cpu_seconds: float) -> None:
        if match.lane is not Lane.PLAIN:  # a plain one's bytes are estimated with its growth
            compiler.grow(match.constraint, match.namespace, self._live.charge(match, cpu_seconds))

    def _judge(self, match: GrammarMatch) -> Verdict:
        constraint = match.constraint
        problem = obvious_problem(constraint)
        if problem is not None:
            return Verdict(problem=f"{field_of(constraint)}: {problem}")
        cost = known_cost(constraint)
        if cost is not None and cost <= MAX_KNOWN_COST:
            return Verdict(num_bytes=estimated_bytes(constraint))
        return self._trials.run(constraint, lambda: match.abandoned)

    def _make_compiler(self) -> Compiler:
        """Reads the tokenizer on first use, and again after a failure."""
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(load_vocabulary(self._find_folder(), self._model), self._limits)
            return self._compiler

    def _advanced(self, matches: list[GrammarMatch], cost: BatchCost) -> None:
        compiler = self._compiler
        assert compiler is not None, "a match was opened"
        if cost.alone:
            matches[0].spend(cost.cpu_seconds, cost.num_tokens)
        for match in matches:
            if isinstance(match.error, InvalidRequest) and match.error.field == field_of(match.constraint):
                with self._lock:
                    self._num_ended += 1
                # Its matchers share one automaton; a new compilation has a new one.
                compiler.drop(match.constraint, match.namespace)
            elif match.error is None:
                self._charge(match, compiler, cost.cpu_seconds)
        if cost.alone and cost.seconds > SLOW_SECONDS and matches[0].lane is Lane.OTHER:
            matches[0].lane = Lane.SLOW
        self._results.put((False, matches))


class _Verdicts:
    """The verdicts of trials, least recently used first. Thread-safe."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._lock = threading.Lock()
        self._of: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, key: bytes) -> Verdict | None:
        with self._lock:
            verdict = self._of.get(key)
            if verdict is not None:
                self._of.move_to_end(key)
            return verdict

    def put(self, key: bytes, verdict: Verdict) -> None:
        with self._lock:
            self._of[key] = verdict
            self._of.move_to_end(key)
            if len(self._of) > self._max_count:
                self._of.popitem(last=False)


def _key(match: GrammarMatch) -> bytes:
    """Returns a digest of a match's owner and constraint."""
    return hashlib.blake2b(repr((match.namespace, match.constraint)).encode(), digest_size=16).digest()
