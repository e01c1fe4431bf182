"""An HTTP response made of one or more generations: starts them, and ends them together.

Decides when something is sent. The subclasses of each API decide what is sent.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from baton.gateway.core import Delta, Generation, GenerationRequest, Generator
from baton.gateway.core import Usage as TokenCounts
from baton.gateway.errors.http import HttpError, http_error_of
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.rest.resumption import event_id
from baton.gateway.rest.sse import CONTENT_TYPE, DONE, Envelope, error_event, with_id
from baton.gateway.resume.journal import Journal
from baton.gateway.schemas.answers import CompletionTokensDetails, PromptTokensDetails, RequestMetrics, Usage
from baton.gateway.serving.chat import rename_field
from baton.rpc.errors import ServiceError

_log = logging.getLogger(__name__)


class AnswerRecorder(Protocol):
    """Stores a response in addition to sending it."""

    def collect(self, index: int, delta: Delta) -> None:
        """Adds a delta of one choice."""

    def store(self, usage: Usage, then: Callable[[], None]) -> None:
        """Stores the complete response, then calls `then`, also after a failure."""


class Answer(ABC):
    """A response. Its generations' sinks deliver here, with choice indices counted over all prompts."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter) -> None:
        self.exchange = exchange
        self.meter = meter
        self.recorder: AnswerRecorder | None = None
        self.field_names: Mapping[str, str] = {}  # client's field names by the generator's
        self._generations: list[Generation] = []
        self._num_running = 0
        self._counts = [0, 0, 0]  # prompt, completion and cached tokens
        self._num_reasoning_tokens = 0
        self._queue_seconds = 0.0
        self._ended = False

    async def run(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
        """Starts every generation. A failure of any ends the whole response with an error."""
        self.exchange.begin_work(self._abort, self._resume)
        self._num_running = len(requests)
        first_index = 0
        for request in requests:
            if first_index:
                await asyncio.sleep(0)  # a batch may have a thousand prompts
            try:
                generation = await generator.start(request, _PromptSink(self, first_index))
            except Exception as error:
                self.fail(error)
                return
            if self._ended:
                generation.abort()
                return
            self._generations.append(generation)
            first_index += request.n

    def done(self, counts: TokenCounts) -> None:
        """Records the end of one generation; finishes the response after the last one."""
        totals = self._counts
        totals[0] += counts.prompt_tokens
        totals[1] += counts.completion_tokens
        totals[2] += counts.cached_tokens
        self._num_reasoning_tokens += counts.reasoning_tokens
        self._queue_seconds = max(self._queue_seconds, counts.queue_seconds)
        self._num_running -= 1
        if self._num_running or self._ended:
            return
        prompt, completion, cached = totals
        usage = usage_of(prompt, completion, cached, self._num_reasoning_tokens)
        if self.recorder is None:
            self.finish(usage)
        else:
            self.recorder.store(usage, lambda: self.finish(usage))
        self._ended = True
        self._generations = []  # they deliver here: a cycle, which only a garbage collection would free
        self.meter.on_done(*totals)

    def metrics(self, envelope: Envelope, usage: Usage) -> RequestMetrics | UnsetType:
        """Returns the request's times, if the gateway gives them."""
        return request_metrics(self.meter, usage, self._queue_seconds) if envelope.with_metrics else UNSET

    def fail(self, error: Exception) -> None:
        """Ends the response and its generations with an error."""
        if self._ended:
            return
        self._ended = True
        self._stop()
        if isinstance(error, ServiceError):
            rename_field(error, self.field_names)
        else:
            _log.error("a generation failed", exc_info=error, extra={"request_id": self.exchange.request_id})
        answer = http_error_of(error)
        self.meter.on_error(answer.type, answer.status)
        self.send_error(answer)

    @abstractmethod
    def deliver(self, index: int, delta: Delta) -> None:
        """Receives a delta of one choice."""

    @abstractmethod
    def finish(self, usage: Usage) -> None:
        """Finishes the response after every choice is complete."""

    def send_error(self, error: HttpError) -> None:
        """Sends an error to the client."""
        self.exchange.fail(error)

    def _abort(self) -> None:
        self._ended = True
        self.meter.on_abort()
        self._stop()

    def _stop(self) -> None:
        generations, self._generations = self._generations, []
        for generation in generations:
            generation.abort()

    def _resume(self) -> None:
        for generation in self._generations:
            generation.resume()


class StreamAnswer(Answer):
    """Streams deltas. Sends the headers with the first one, so that an early error keeps its status."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, num_choices: int) -> None:
        super().__init__(exchange, meter)
        self.envelope = envelope
        self.head = envelope.head
        self.tail = envelope.tail
        self._num_unfinished = num_choices
        self._streaming = False
        self._held = b""

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.token_ids:
            self.meter.on_tokens(index)
        if self.exchange.journal is not None:
            self._deliver_named(index, delta, self.exchange.journal)
            return
        if self._streaming:
            data = self.piece(index, delta)
        else:
            self._streaming = True
            self.exchange.stream(CONTENT_TYPE)
            data = self.opening() + self.piece(index, delta)
        if delta.finish_reason is not None:
            data += self.ending(index, delta)
            self._num_unfinished -= 1
            # `finish` follows at once, except after a stop string, when the worker's counts are still to come.
            if not self._num_unfinished and not isinstance(delta.stop_reason, str):
                self._held = data
                return
        if data:
            self.exchange.write(data)

    def _deliver_named(self, index: int, delta: Delta, journal: Journal) -> None:
        """Delivers with an event id per delta, and without what the client already has."""
        cursor = journal.cursor
        is_new = cursor.advance(index, len(delta.token_ids), delta.finish_reason is not None)
        data = b""
        if not self._streaming:
            self._streaming = True
            self.exchange.stream(CONTENT_TYPE)
            opening = self.opening()
            data = b"" if cursor.resumed else opening
        piece = self.piece(index, delta)
        if delta.finish_reason is not None:
            piece += self.ending(index, delta)
            self._num_unfinished -= 1
        if is_new:
            data += piece
        if data:
            data = with_id(data, event_id(journal.head.request_id, cursor.text))
        if not self._num_unfinished:
            self._held = data
        elif data:
            self.exchange.write(data)

    def finish(self, usage: Usage) -> None:
        envelope = self.envelope
        last = self.head + envelope.tail_with(usage, self.metrics(envelope, usage)) if envelope.include_usage else b""
        self.exchange.end(self._held + last + DONE)

    def send_error(self, error: HttpError) -> None:
        if self._streaming:
            self.exchange.end(self._held + error_event(error))
        else:
            self.exchange.fail(error)

    def opening(self) -> bytes:
        """Returns the events before the first delta."""
        return b""

    @abstractmethod
    def piece(self, index: int, delta: Delta) -> bytes:
        """Returns the event for a delta's text and log-probabilities, or nothing if it has none."""

    @abstractmethod
    def ending(self, index: int, delta: Delta) -> bytes:
        """Returns the event for a choice's end."""


class _PromptSink:
    """Implements Sink for one prompt's generation."""

    __slots__ = ("_answer", "_exchange", "_first_index")

    def __init__(self, answer: Answer, first_index: int) -> None:
        self._answer = answer
        self._exchange = answer.exchange
        self._first_index = first_index

    @property
    def writable(self) -> bool:
        journal = self._exchange.journal
        # Deltas that the client already has are not sent, and must not be merged with new ones.
        return self._exchange.writable or (journal is not None and journal.cursor.behind)

    def on_delta(self, delta: Delta) -> None:
        try:
            if self._answer.recorder is not None:
                self._answer.recorder.collect(self._first_index + delta.index, delta)
            self._answer.deliver(self._first_index + delta.index, delta)
        except Exception as error:
            self._answer.fail(error)

    def on_done(self, usage: TokenCounts) -> None:
        try:
            self._answer.done(usage)
        except Exception as error:
            self._answer.fail(error)

    def on_error(self, error: ServiceError) -> None:
        self._answer.fail(error)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    """Returns OpenAI's usage object."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning_tokens),
    )


def request_metrics(meter: AnswerMeter, usage: Usage, queue_seconds: float) -> RequestMetrics:
    """Returns the times of a response that has ended."""
    first, seconds, num_tokens = meter.first_token_seconds, meter.generation_seconds, usage.completion_tokens
    per_choice = num_tokens / meter.num_choices
    return RequestMetrics(
        time_to_first_token_ms=None if first is None else _ms(first),
        generation_time_ms=_ms(seconds),
        queue_time_ms=_ms(queue_seconds),
        mean_itl_ms=_ms(seconds / (per_choice - 1)) if per_choice > 1 else None,
        tokens_per_second=round(num_tokens / seconds, 3) if seconds else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
