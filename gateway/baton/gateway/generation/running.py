"""A running request: places it, submits its choices, moves them when their worker fails, and ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from baton.gateway.core import GenerationRequest, Sink, Usage
from baton.gateway.generation.choice_run import ChoiceRun
from baton.gateway.generation.hashed_prompt import HashedPrompt
from baton.gateway.generation.messages import RequestMessages
from baton.gateway.generation.output.choice import Choice
from baton.gateway.generation.output.delta_buffer import DeltaBuffer
from baton.gateway.generation.placement import PlacementUse
from baton.gateway.generation.retry_budget import PoisonousRequest, RetryBudget
from baton.gateway.generation.workers.stream import WorkerStream
from baton.gateway.generation.workers.stream_pool import WorkerStreams
from baton.gateway.metrics.counters import GenerationCounters
from baton.gateway.models.constraints.structured_output import name_field
from baton.gateway.models.sampling import ResolvedRequest
from baton.gateway.resume.journal import Journal
from baton.gateway.routers.placer import Placed, Placer
from baton.gateway.tracing.request import GatewayTracing, place
from baton.rpc.errors import DeadlineExceeded, InternalError, NoCapacity, ServiceError, Unavailable
from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

# Minimum time between searches for a better worker while a device is stalled.
_LOOK_SECONDS = 1.0

# How long the end of a choice waits for the worker's token counts after a stop string.
_COUNTS_SECONDS = 1.0

# Tokens that workers send together for a response that is read at its end. A lost worker's are computed again.
_WHOLE_INTERVAL = 32
_BACKGROUND_INTERVAL = 256  # the same for requests of a priority above 0, whose clients do not wait


@dataclass(frozen=True, slots=True)
class GenerationServices:
    """The services that a running generation uses."""

    router: Placer
    streams: WorkerStreams
    counters: GenerationCounters
    tracing: GatewayTracing | None = None  # None: tracing is disabled
    stream_interval: int = 1  # tokens of a delta
    fixed: Callable[[Collection[str]], Placed] | None = None  # places on other than these workers, without a router
    running: set[RunningGeneration] = field(default_factory=set)


class RunningGeneration:
    """Implements Generation."""

    def __init__(
        self,
        request: GenerationRequest,
        resolved: ResolvedRequest,
        prompt: HashedPrompt,
        model: str,
        choices: Sequence[Choice],
        sink: Sink,
        services: GenerationServices,
    ) -> None:
        self._request = request
        self._resolved = resolved
        self._prompt = prompt
        interval = services.stream_interval
        if request.whole:
            interval = _BACKGROUND_INTERVAL if request.priority > 0 else _WHOLE_INTERVAL
        self._messages = RequestMessages(request, resolved, prompt, model, len(choices), interval)
        self._choices = choices
        self._services = services
        self._trace = None if services.tracing is None else services.tracing.of(request.traceparent)
        self.deltas = DeltaBuffer(sink, services.counters.finished_choices, services.stream_interval)
        self._runs: dict[int, ChoiceRun] = {}  # by choice, while on a worker
        self._cached: dict[int, int] = {}  # cached tokens by choice
        self._unsettled = len(choices)
        self._lost: list[tuple[Choice, ServiceError]] = []
        self._excluded: list[str] = []
        self._silent: set[str] = set()  # excluded workers that may still be alive
        self._budget = RetryBudget(len(choices))
        self._failover: asyncio.Task[None] | None = None
        self._search: asyncio.Task[None] | None = None  # search for a better worker
        self._search_again_at = 0.0
        self._deadline = time.monotonic() + request.timeout_ms / 1000 if request.timeout_ms else None
        self._timers: list[asyncio.TimerHandle] = []
        self._stopped = False
        self._queue_us = 0  # the longest wait of a choice in a worker
        self._on_end = request.on_end

    async def begin(self) -> None:
        """Starts the generation. An exception ends it."""
        self._services.running.add(self)
        try:
            await self._begin()
        except BaseException:
            self._services.running.discard(self)
            raise

    async def _begin(self) -> None:
        """Places and submits all choices on one worker, or the incomplete choices of a resumed stream."""
        choices = self._choices if self._request.journal is None else self._replay(self._request.journal)
        if not choices:
            self._end(self._usage())
            return
        if self._deadline is None:
            await self._place(choices)
            return
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._request.timeout_ms / 1000):
                await self._place(choices)
        except TimeoutError as error:
            raise self._too_late() from error
        self._later(self._deadline - time.monotonic(), self._expire)

    def take(
        self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None
    ) -> None:
        """Receives new tokens of a choice."""
        journal = self._request.journal
        if journal is None:
            self.deltas.emit(choice.take(token_ids, logprobs))
            return
        # Tokens before and after the client's position never share a delta.
        cut = journal.split(choice.index, len(choice.output_token_ids), len(token_ids))
        for start, end in ((0, cut), (cut, len(token_ids))):
            if start < end and not choice.finished:
                journal.append(choice.index, token_ids[start:end])
                part = None if logprobs is None else logprobs[start:end]
                self.deltas.emit(choice.take(token_ids[start:end], part))
            if start < end == cut:
                self.deltas.flush(choice.index)

    def _replay(self, journal: Journal) -> list[Choice]:
        """Replays the tokens of a resumed stream. Returns the choices that continue."""
        journal.check_length(self._resolved.stop.max_tokens)
        sampling = self._resolved.sampling
        if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
            # Log-probabilities are not recorded, so everything is computed again.
            return list(self._choices)
        going = []
        for choice in self._choices:
            token_ids = journal.replayed(choice.index)
            if token_ids:
                self.take(choice, token_ids, None)
            end = None if choice.finished else self._resolved.end_of(choice.output_token_ids)
            if end is not None:
                self.deltas.emit(choice.end(*end))
            if choice.finished:
                self._unsettled -= 1
            else:
                going.append(choice)
        return going

    def abort(self) -> None:
        self._count_unfinished("abort")
        self.deltas.close()
        self._note_end()
        self._stop_everything()

    def cancel(self) -> None:
        if self._stopped or not self._unsettled:
            return
        for choice in self._choices:
            if not choice.finished:
                self.deltas.emit(choice.end("abort", None))
        usage = self._usage()
        self._stop_everything()
        self._end(usage)

    def resume(self) -> None:
        self.deltas.resume()

    def shut_down(self) -> None:
        """Ends the generation because the gateway stops.

        A resumable stream gets no error: it continues at another gateway.
        """
        if self._request.journal is None:
            self._fail(Unavailable("the gateway shut down before the generation finished; retry"))

    def stop_early(self, run: ChoiceRun) -> None:
        """Aborts a choice that a stop string ended. The worker's reply brings the token counts."""
        run.stream.abort(run.slot)
        if run.choice.index in self._runs:
            self._later(_COUNTS_SECONDS, lambda: self.settle(run, None))

    def waited(self, queue_us: int) -> None:
        """Records how long a choice waited in its worker before it was computed."""
        self._queue_us = max(self._queue_us, queue_us)

    def settle(self, run: ChoiceRun, num_cached_tokens: int | None) -> None:
        """Settles a finished choice after its token counts arrived or will not arrive."""
        if self._runs.pop(run.choice.index, None) is None:
            return
        cached = run.use.predicted_cached_tokens if num_cached_tokens is None else num_cached_tokens
        self._cached[run.choice.index] = min(cached, len(self._prompt.token_ids))
        self._unsettled -= 1
        if self._unsettled == 0:
            self._end(self._usage())

    def lose(self, run: ChoiceRun, error: ServiceError) -> None:
        """Moves a choice whose worker failed to another worker, or fails the request."""
        choice = run.choice
        if self._stopped:
            return
        end = self._resolved.end_of(choice.output_token_ids)
        if end is not None:
            # Only the worker's finish message was lost.
            self.deltas.emit(choice.end(*end))
            self.settle(run, None)
            return
        del self._runs[choice.index]
        try:
            self._budget.spend(choice.index, len(choice.output_token_ids), error, run.stream)
        except ServiceError as final:
            self._refuse(final)
            return
        worker_id = run.stream.worker_id
        if run.stream.is_silent:
            self._silent.add(worker_id)
        elif worker_id not in self._excluded:
            self._excluded.append(worker_id)
        self._lost.append((choice, error))
        if self._failover is None:
            self._failover = asyncio.get_running_loop().create_task(self._move_lost())

    def lose_prefill(self, run: ChoiceRun, worker_id: str, message: str) -> None:
        """Records the death of a prefill worker. The choice continues on its worker unless the request is to blame."""
        choice = run.choice
        if self._stopped or choice.finished:
            return
        error = Unavailable(message, phase=types_pb2.PHASE_PREFILL, worker_id=worker_id)
        try:
            self._budget.blame_prefill(choice.index, len(choice.output_token_ids), error, (worker_id, run.use))
        except PoisonousRequest as final:
            self._refuse(final)

    def find_better(self, run: ChoiceRun) -> None:
        """Searches for another worker while the device of this one is stalled. Without one, the request stays."""
        now = time.monotonic()
        if not self._stopped and self._search is None and now >= self._search_again_at:
            self._search_again_at = now + _LOOK_SECONDS
            self._search = asyncio.get_running_loop().create_task(self._leave(run.stream))

    async def _leave(self, stream: WorkerStream) -> None:
        try:
            runs = [run for run in self._runs.values() if run.stream is stream and self._may_leave(run)]
            if not runs:
                return
            self._silent.add(stream.worker_id)
            placed = await self._ask([run.choice for run in runs])
            runs = [run for run in runs if self._runs.get(run.choice.index) is run and run.waits]
            if self._stopped or not runs or placed.response.decode.worker_id == stream.worker_id:
                PlacementUse(self._services.router, placed, 1).done(0, None, worker_failed=False)
                return
            for run in runs:
                del self._runs[run.choice.index]
                run.leave()
            self._submit([run.choice for run in runs], placed)
            self._services.counters.failovers += len(runs)
        except ServiceError as error:
            _log.info("no other worker for a request on a stalled device: %s", error.message)
        except Exception as error:
            _log.exception("failed to move a request", extra={"request_id": self._request.request_id})
            self._fail(InternalError(f"unexpected {type(error).__name__} while moving the request; see the log"))
        finally:
            self._search = None

    def _may_leave(self, run: ChoiceRun) -> bool:
        if run.choice.finished:
            return False
        run.waits = True
        return self._budget.may_leave(run.choice.index, len(run.choice.output_token_ids))

    async def _move_lost(self) -> None:
        try:
            while self._lost:
                lost, self._lost = self._lost, []
                await self._move(lost)
        except Exception as error:
            _log.exception("failed to move a request", extra={"request_id": self._request.request_id})
            self._fail(InternalError(f"unexpected {type(error).__name__} while moving the request; see the log"))
        finally:
            self._failover = None

    async def _move(self, lost: list[tuple[Choice, ServiceError]]) -> None:
        cause = lost[0][1]
        _log.warning(
            "moving %d of %d choices to another worker: %s",
            len(lost),
            len(self._choices),
            cause.message,
            extra={"request_id": self._request.request_id},
        )
        await asyncio.sleep(max(self._budget.pause_seconds(choice.index) for choice, _ in lost))
        if self._stopped:
            return
        try:
            await self._place([choice for choice, _ in lost])
        except ServiceError as error:
            self._fail(cause if isinstance(cause, NoCapacity) else error)
        else:
            self._services.counters.failovers += len(lost)

    async def _place(self, choices: Sequence[Choice]) -> None:
        placed = await self._ask(choices)
        if self._stopped:
            PlacementUse(self._services.router, placed, 1).done(0, None, worker_failed=False)
            return
        self._submit(choices, placed)

    async def _ask(self, choices: Sequence[Choice]) -> Placed:
        if self._services.fixed is not None:
            return self._services.fixed(self._excluded)
        message = self._messages.place(choices, self._excluded, self._remaining_ms())
        avoided = self._silent.union(self._services.streams.avoided())
        return await place(self._trace, self._services.router, message, avoided)

    def _submit(self, choices: Sequence[Choice], placed: Placed) -> None:
        use = PlacementUse(self._services.router, placed, len(choices), self._trace and self._trace.generate(placed))
        stream = self._services.streams.get(placed.response.decode)
        for choice in choices:
            run = ChoiceRun(self, choice, use, stream)
            self._runs[choice.index] = run
            message = self._messages.submit(choice, placed.response, self._remaining_ms())
            run.slot = stream.submit(use.signed(message), run, self._prompt)

    def _remaining_ms(self) -> int:
        if self._deadline is None:
            return 0
        return max(1, int((self._deadline - time.monotonic()) * 1000))

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=sum(len(choice.output_token_ids) for choice in self._choices),
            cached_tokens=min(self._cached.values(), default=0),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
            queue_seconds=self._queue_us / 1e6,
        )

    def _refuse(self, error: ServiceError) -> None:
        self._services.counters.poisonous_requests += isinstance(error, PoisonousRequest)
        self._fail(error)

    def _expire(self) -> None:
        self._fail(self._too_late())

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the generation did not finish within timeout_ms={self._request.timeout_ms}",
            field="timeout_ms",
            phase=types_pb2.PHASE_DECODE,
        )

    def _fail(self, error: ServiceError) -> None:
        of_tools = self._request.output_parsing is not None and self._request.output_parsing.constraint is not None
        name_field(error, "tools" if of_tools else self._request.constraint_field)
        self._count_unfinished("error")
        self._note_end()
        self._stop_everything()
        self.deltas.end(error)

    def _count_unfinished(self, ending: str) -> None:
        self._services.counters.finished_choices[ending] += sum(not choice.finished for choice in self._choices)

    def _end(self, usage: Usage) -> None:
        self._cancel_timers()
        self._note_end()
        self.deltas.end(usage)

    def _note_end(self) -> None:
        """Unregisters the generation and calls `on_end`. Idempotent."""
        self._services.running.discard(self)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self._usage())

    def _stop_everything(self) -> None:
        self._stopped = True
        self._cancel_timers()
        for choice in self._choices:
            choice.finished = True
        runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.stream.abort(run.slot)
        self._lost.clear()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(max(0.0, seconds), action))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
