"""The two forms of a response to POST /v1/messages: one message, or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from baton.gateway.anthropic.blocks import Added, Change, ContentBlocks, Started
from baton.gateway.anthropic.request import FIELDS
from baton.gateway.anthropic.types import Message, MessageUsage, ThinkingTokens
from baton.gateway.core import Delta
from baton.gateway.core import Usage as TokenCounts
from baton.gateway.errors.anthropic import AnthropicError
from baton.gateway.errors.http import HttpError
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.rest.sse import CONTENT_TYPE
from baton.gateway.schemas.answers import Usage as TokenUsage
from baton.gateway.serving.answer import Answer
from baton.gateway.serving.chat import events_of, rename_field
from baton.rpc.errors import ServiceError

_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_PING_SECONDS = 10.0


class MessageAnswer(Answer):
    """The common part of both forms: content blocks and the stop reason."""

    def __init__(
        self,
        exchange: Exchange,
        meter: AnswerMeter,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        super().__init__(exchange, meter)
        self.blocks = ContentBlocks()
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens  # max_tokens; a shorter output with finish reason length filled the context
        self._num_thinking_tokens = 0
        self._ended_by: tuple[str, str | None] = ("end_turn", None)

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.token_ids:
            self.meter.on_tokens(index)
        changes = self.blocks.take(events_of(delta))
        if delta.finish_reason is not None:
            changes += self.blocks.finish()
            self._ended_by = self._ended_by_of(delta)
        self.changed(changes)

    def done(self, counts: TokenCounts) -> None:
        self._num_thinking_tokens = counts.reasoning_tokens
        super().done(counts)

    def fail(self, error: Exception) -> None:
        if isinstance(error, ServiceError):
            rename_field(error, FIELDS)
        super().fail(error)

    def changed(self, changes: Sequence[Change]) -> None:
        """Receives changes of the content blocks."""

    def message(self, usage: TokenUsage | None) -> Message:
        """Returns the message; without `usage`, as it is at the start."""
        if usage is None:
            start = MessageUsage(input_tokens=self._num_prompt_tokens, output_tokens=0)
            return self._message([], None, None, start)
        reason, sequence = self.stop_of(usage)
        return self._message(self.blocks.complete, reason, sequence, self.usage_of(usage))

    def stop_of(self, usage: TokenUsage) -> tuple[str, str | None]:
        """Returns stop_reason and stop_sequence."""
        if self._ended_by[0] == "max_tokens" and usage.completion_tokens < self._max_tokens:
            return "model_context_window_exceeded", None
        return self._ended_by

    def usage_of(self, usage: TokenUsage) -> MessageUsage:
        """Returns the token counts in Anthropic's form."""
        cached = usage.prompt_tokens_details.cached_tokens
        thinking = self._num_thinking_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking) if thinking else None,
        )

    def _ended_by_of(self, delta: Delta) -> tuple[str, str | None]:
        if self.blocks.has_calls and delta.finish_reason != "length":
            return "tool_use", None
        if isinstance(delta.stop_reason, str) and delta.finish_reason == "stop":
            return "stop_sequence", delta.stop_reason
        return ("max_tokens" if delta.finish_reason == "length" else "end_turn"), None

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: MessageUsage
    ) -> Message:
        return Message(
            id=f"msg_{self.exchange.request_id}",
            model=self._model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


class MessageDocument(MessageAnswer):
    """Responds with one message."""

    def finish(self, usage: TokenUsage) -> None:
        self.exchange.respond(200, msgspec.json.encode(self.message(usage)))


class MessageStream(MessageAnswer):
    """Streams events. Sends the headers with the first event, so that an early error keeps its status."""

    def __init__(
        self,
        exchange: Exchange,
        meter: AnswerMeter,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
    ) -> None:
        super().__init__(exchange, meter, model, num_prompt_tokens, max_tokens)
        self._streaming = False
        self._pinged = False
        self._timer: asyncio.TimerHandle | None = None
        exchange.on_end.append(lambda _: self._stop_pinging())

    def changed(self, changes: Sequence[Change]) -> None:
        data = b"" if self._streaming else self._begin()
        for change in changes:
            data += _event_of(change)
            if not self._pinged:
                self._pinged = True
                data += _PING
        if data:
            self.exchange.write(data)

    def finish(self, usage: TokenUsage) -> None:
        reason, sequence = self.stop_of(usage)
        counts = msgspec.to_builtins(self.usage_of(usage))
        del counts["service_tier"]
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        data = event("message_delta", {"delta": delta, "usage": counts}) + event("message_stop", {})
        self.exchange.end(data)

    def send_error(self, error: HttpError) -> None:
        if self._streaming:
            body = AnthropicError(error, self.exchange.request_id).body
            self.exchange.end(b"event: error\ndata: %b\n\n" % body)
        else:
            self.exchange.fail(error)

    def _begin(self) -> bytes:
        self._streaming = True
        self.exchange.stream(CONTENT_TYPE)
        self._timer = asyncio.get_running_loop().call_later(_PING_SECONDS, self._ping)
        return event("message_start", {"message": msgspec.to_builtins(self.message(None))})

    def _ping(self) -> None:
        if self.exchange.writable:
            self.exchange.write(_PING)
        self._timer = asyncio.get_running_loop().call_later(_PING_SECONDS, self._ping)

    def _stop_pinging(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Returns one event of the stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _event_of(change: Change) -> bytes:
    if isinstance(change, Started):
        return event("content_block_start", {"index": change.index, "content_block": change.block})
    if isinstance(change, Added):
        return event("content_block_delta", {"index": change.index, "delta": change.delta})
    return event("content_block_stop", {"index": change.index})
