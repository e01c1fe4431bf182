"""A running response: the sink of a generation, and the source of events for the clients that follow it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import msgspec
import orjson

from baton.gateway.core import Delta, Generation, Usage
from baton.gateway.errors.http import HttpError, http_error_of
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.responses.output import OutputItems, StreamEvent
from baton.gateway.responses.request import FIELDS
from baton.gateway.responses.types import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from baton.gateway.serving.chat import rename_field
from baton.rpc.errors import ServiceError

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """A client that waits for a response or streams its events."""

    @property
    def writable(self) -> bool:
        """Returns whether the client keeps up with the events."""

    def progressed(self) -> None:
        """Called when there are new events."""

    def ended(self, error: HttpError | None) -> None:
        """Called once when the response is complete, failed or cancelled."""


class RunningResponse:
    """Implements Sink. `settle` is awaited after the end and before followers are notified: it stores the response."""

    def __init__(
        self,
        response: Response,
        output: OutputItems,
        meter: AnswerMeter,
        settle: Callable[[RunningResponse], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.response = response
        self.events: list[bytes] = []  # events that were not dropped yet
        self.num_forgotten = 0
        self.begun = False  # whether the generation has produced output or failed
        self.over = False  # whether followers were notified of the end
        self.error: HttpError | None = None
        self.failure: Exception | None = None  # the cause of `error`
        self.generation: Generation | None = None
        self.tenant = ""  # the owner
        self.session = ""  # that later responses of the conversation continue
        self.cut_short = False  # whether the output ended at the token limit, or was aborted
        self.output = output
        self._meter = meter
        self._settle = settle
        self._spawn = spawn
        self._followers: list[Follower] = []
        self.ended = False  # whether the generation has ended
        self._aborted = False
        self._emit({"type": "response.created"})
        self._emit({"type": "response.queued" if response.background else "response.in_progress"})

    @property
    def num_events(self) -> int:
        """Returns the number of all events so far."""
        return self.num_forgotten + len(self.events)

    # Sink

    @property
    def writable(self) -> bool:
        return self.response.background or all(follower.writable for follower in self._followers)

    def on_delta(self, delta: Delta) -> None:
        if self.ended:
            return
        try:
            self._take(delta)
        except Exception as error:
            self.fail(error)

    def on_done(self, usage: Usage) -> None:
        if self.ended:
            return
        self._begin()
        self.response.usage = _usage_of(usage)
        self._meter.on_done(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if self.cut_short:
            self.response.incomplete_details = IncompleteDetails("aborted" if self._aborted else "max_output_tokens")
        self._end("incomplete" if self.cut_short else "completed")

    def on_error(self, error: ServiceError) -> None:
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the response with an error."""
        if self.ended:
            return
        if isinstance(error, ServiceError):
            rename_field(error, FIELDS)
        else:
            _log.error("a response failed", exc_info=error, extra={"request_id": self.response.id})
        self.failure = error
        self.error = http_error_of(error)
        self._meter.on_error(self.error.type, self.error.status)
        self.response.error = ResponseError(_code_of(self.error), self.error.message)
        self._abort()
        self._end("failed")

    def show(self, events: Iterable[StreamEvent], begin: bool = True) -> None:
        """Emits events of items that no model wrote. `begin`: followers get them before the generation begins."""
        if self.ended:
            return
        if begin:
            self._begin()
        for event in events:
            self._emit(event)
        if self.begun:
            self._notify_followers()

    # Requests of clients

    def cancel(self) -> None:
        """Cancels the response on a client's request."""
        if self.ended:
            return
        self._meter.on_abort()
        self._abort()
        self._end("cancelled")

    def abandon(self) -> None:
        """Ends the response without storing it, because no client waits for it."""
        if self.ended:
            return
        self.ended = self.over = True
        self._meter.on_abort()
        self._abort()
        self._spawn(self._settle(self))

    def resume(self) -> None:
        """Resumes the generation after a slow follower has caught up."""
        if self.generation is not None:
            self.generation.resume()

    def follow(self, follower: Follower) -> None:
        """Adds a follower and notifies it of what has happened so far."""
        self._followers.append(follower)
        if self.begun:
            follower.progressed()
        if self.over:
            follower.ended(self.error)

    def unfollow(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    def forget_until(self, number: int) -> None:
        """Drops the events before this number."""
        del self.events[: number - self.num_forgotten]
        self.num_forgotten = max(self.num_forgotten, number)

    def _take(self, delta: Delta) -> None:
        self._begin()
        if delta.token_ids:
            self._meter.on_tokens(0)
        for event in self.output.take(delta):
            self._emit(event)
        if delta.finish_reason is not None:
            self._aborted = delta.finish_reason == "abort"
            self.cut_short = delta.finish_reason in ("length", "abort")
            for event in self.output.finish("incomplete" if self.cut_short else "completed"):
                self._emit(event)
        self._notify_followers()

    def _begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        if self.response.status == "queued":
            self.response.status = "in_progress"
            self._emit({"type": "response.in_progress"})

    def _abort(self) -> None:
        if self.generation is not None:
            self.generation.abort()

    def _end(self, status: str) -> None:
        self.ended = True
        for event in self.output.finish("incomplete"):
            self._emit(event)
        for item in list(self.output.waiting):
            for event in self.output.settle(item, "incomplete"):
                self._emit(event)
        response = self.response
        response.status = status  # type: ignore[assignment]
        response.output = self.output.complete
        if status == "completed":
            response.completed_at = int(time.time())
        if status != "cancelled":
            self._emit({"type": f"response.{status}"})
        self._spawn(self._conclude())

    async def _conclude(self) -> None:
        try:
            await self._settle(self)
        finally:
            self.over = True
            if self.begun:
                self._notify_followers()
            followers, self._followers = self._followers, []
            for follower in followers:
                follower.ended(self.error)

    def _emit(self, event: StreamEvent) -> None:
        if event["type"].count(".") == 1:  # events of the response itself
            event["response"] = msgspec.to_builtins(self.response)
        name = event["type"].encode()
        data = orjson.dumps({**event, "sequence_number": self.num_events})
        self.events.append(b"event: %b\ndata: %b\n\n" % (name, data))

    def _notify_followers(self) -> None:
        for follower in list(self._followers):
            follower.progressed()


def _usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _code_of(error: HttpError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
