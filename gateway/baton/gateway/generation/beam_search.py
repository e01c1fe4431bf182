"""Beam search over any Generator: each step asks for every beam's most likely next tokens and keeps the best beams.

The beams share their prompt's blocks on the workers. A score is the sum of the model's log-probabilities divided by
length ** length_penalty.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.gateway.core import Delta, Generation, GenerationRequest, Generator, Sink, TokenLogprob, Usage
from baton.gateway.generation.generator import make_choice
from baton.gateway.models.sampling import RequestLimits, ResolvedRequest, resolve
from baton.gateway.models.served import ModelCatalog, ServedModel
from baton.rpc.errors import DeadlineExceeded, InternalError, InvalidRequest, ServiceError
from baton.v1 import types_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beam:
    """A partial or complete continuation."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # sum over its tokens
    end: tuple[str, int | None] | None = None  # finish reason and stop token; None while it continues
    logprobs: tuple[float, ...] = ()  # of its tokens

    def score(self, length_penalty: float) -> float:
        """Returns the score by which beams are compared; higher is better."""
        return self.logprob / float(max(1, len(self.token_ids)) ** length_penalty)


def expanded(
    beams: Sequence[Beam], next_tokens: Sequence[TokenLogprob], resolved: ResolvedRequest, width: int
) -> tuple[list[Beam], list[Beam]]:
    """Returns the best `width` beams that continue, and the beams that end here. next_tokens[i] follows beams[i]."""
    active: list[Beam] = []
    ended: list[Beam] = []
    for beam, entry in zip(beams, next_tokens, strict=True):
        for one in entry.top:
            token_ids = (*beam.token_ids, one.token_id)
            end = resolved.end_of(token_ids)
            grown = Beam(token_ids, beam.logprob + one.logprob, end, (*beam.logprobs, one.logprob))
            (active if end is None else ended).append(grown)
    active.sort(key=lambda beam: -beam.logprob)
    return active[:width], ended


def is_settled(active: Sequence[Beam], ended: Sequence[Beam], width: int, length_penalty: float) -> bool:
    """Returns whether no continuing beam can still be among the best, judged by the current scores."""
    if not active:
        return True
    best = sorted((beam.score(length_penalty) for beam in ended), reverse=True)[:width]
    return len(best) == width and max(beam.score(length_penalty) for beam in active) < best[-1]


OnBeams = Callable[[Sequence[Beam]], None]


class BeamSearchGenerator:
    """Implements Generator: the request's n choices are its n best beams, best first.

    `on_beams` is called with each request's beams before their deltas.
    """

    def __init__(
        self,
        inner: Generator,
        catalog: ModelCatalog,
        limits: RequestLimits,
        length_penalty: float,
        on_beams: OnBeams | None = None,
    ) -> None:
        self._inner = inner
        self._catalog = catalog
        self._limits = limits
        self._length_penalty = length_penalty
        self._on_beams = on_beams

    async def start(self, request: GenerationRequest, sink: Sink) -> Generation:
        if 2 * request.n > self._limits.max_logprobs:
            most = self._limits.max_logprobs // 2
            raise InvalidRequest(f"n is {request.n}; at most {most} beams are allowed in a beam search", field="n")
        model = self._catalog.get(request.model)
        resolved = resolve(request, model.defaults, model.require_info(), self._limits)
        return _Search(self._inner, request, resolved, model, sink, self._length_penalty, self._on_beams)


class _Search:
    """Implements Generation for a running search."""

    def __init__(
        self,
        inner: Generator,
        request: GenerationRequest,
        resolved: ResolvedRequest,
        model: ServedModel,
        sink: Sink,
        length_penalty: float,
        on_beams: OnBeams | None,
    ) -> None:
        self._inner = inner
        self._request = request
        self._resolved = resolved
        self._model = model
        self._sink = sink
        self._length_penalty = length_penalty
        self._on_beams = on_beams
        self._cached_tokens = 0
        self._num_tokens = 0  # over all beams, dropped ones included
        self._task = asyncio.get_running_loop().create_task(self._run())
        if request.on_end is not None:
            self._task.add_done_callback(partial(self._report_usage, request.on_end))

    def abort(self) -> None:
        self._task.cancel()

    def cancel(self) -> None:
        if self._task.done():
            return
        self._task.cancel()
        for index in range(self._request.n):
            self._sink.on_delta(Delta(index, "", (), finish_reason="abort"))
        self._sink.on_done(Usage(len(self._request.prompt_token_ids), 0, self._cached_tokens))

    def resume(self) -> None:
        """Does nothing: all deltas are sent at the end."""

    async def _run(self) -> None:
        milliseconds = self._request.timeout_ms
        try:
            async with asyncio.timeout(milliseconds / 1000 if milliseconds else None):
                beams = await self._search()
        except TimeoutError:
            message = f"the generation did not finish within timeout_ms={milliseconds}"
            self._sink.on_error(DeadlineExceeded(message, field="timeout_ms", phase=types_pb2.PHASE_DECODE))
        except ServiceError as error:
            self._sink.on_error(error)
        except Exception:
            _log.exception("a beam search failed", extra={"request_id": self._request.request_id})
            self._sink.on_error(InternalError("the beam search failed; see the gateway's log"))
        else:
            self._send_beams(beams)

    async def _search(self) -> list[Beam]:
        width, penalty = self._request.n, self._length_penalty
        active, ended = [Beam()], list[Beam]()
        while not is_settled(active, ended, width, penalty):
            self._num_tokens += len(active)
            active, newly_ended = expanded(active, await self._next_tokens(active), self._resolved, width)
            ended += newly_ended
            ended.sort(key=lambda beam: -beam.score(penalty))
            del ended[width:]
        return ended

    async def _next_tokens(self, beams: Sequence[Beam]) -> list[TokenLogprob]:
        """Returns each beam's next token with its alternatives."""
        steps = [_Step(self._step_request(index, beam)) for index, beam in enumerate(beams)]
        try:
            for step in steps:
                step.generation = await self._inner.start(step.request, step)
            entries = [await step.entry for step in steps]
        finally:
            for step in steps:
                step.abort()
        if not beams[0].token_ids:
            self._cached_tokens = steps[0].cached_tokens
        return entries

    def _step_request(self, index: int, beam: Beam) -> GenerationRequest:
        request = self._request
        sampling = types_pb2.SamplingParams(temperature=0, logprobs=2 * request.n)
        return replace(
            request,
            request_id=f"{request.request_id}-{len(beam.token_ids)}-{index}",
            prompt_token_ids=[*request.prompt_token_ids, *beam.token_ids],
            sampling=sampling,
            stop=types_pb2.StopConditions(max_tokens=1, ignore_eos=True),
            n=1,
            detokenize=False,
            output_parsing=None,
            on_end=None,
        )

    def _report_usage(self, on_end: Callable[[Usage], None], task: asyncio.Task[None]) -> None:
        on_end(Usage(len(self._request.prompt_token_ids), self._num_tokens, self._cached_tokens))

    def _send_beams(self, beams: Sequence[Beam]) -> None:
        if self._on_beams is not None:
            self._on_beams(beams)
        for index, beam in enumerate(beams):
            choice = make_choice(index, self._request, self._resolved, self._model)
            self._sink.on_delta(choice.take(beam.token_ids, None))
            if not choice.finished and beam.end is not None:
                self._sink.on_delta(choice.end(*beam.end))
        num_tokens = sum(len(beam.token_ids) for beam in beams)
        self._sink.on_done(Usage(len(self._request.prompt_token_ids), num_tokens, self._cached_tokens))


class _Step:
    """Implements Sink for one beam's next token."""

    writable = True

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.entry: asyncio.Future[TokenLogprob] = asyncio.get_running_loop().create_future()
        self.generation: Generation | None = None
        self.cached_tokens = 0
        self._found: TokenLogprob | None = None

    def on_delta(self, delta: Delta) -> None:
        if delta.logprobs:
            self._found = delta.logprobs[0]

    def on_done(self, usage: Usage) -> None:
        self.cached_tokens = usage.cached_tokens
        if self.entry.done():
            return
        if self._found is None:
            self.entry.set_exception(InternalError("the worker returned no log-probabilities"))
        else:
            self.entry.set_result(self._found)

    def on_error(self, error: ServiceError) -> None:
        if not self.entry.done():
            self.entry.set_exception(error)

    def abort(self) -> None:
        """Ends the step, whose result is no longer needed."""
        self.entry.cancel()
        if self.entry.done() and not self.entry.cancelled():
            self.entry.exception()  # marks it as retrieved, so that asyncio does not log it
        if self.generation is not None:
            self.generation.abort()
