"""The two forms of a chat's answer where all text is the answer: chunks as the text comes, or one document."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from baton.gateway.answer import Answer, StreamAnswer, usage_of
from baton.gateway.generation import Delta, TokenLogprob
from baton.gateway.http_exchange import Exchange
from baton.gateway.metrics import AnswerMeter
from baton.gateway.openai_logprobs import chat_logprobs, prompt_logprobs
from baton.gateway.openai_types import ChatAnswer, ChatChoice, ChatCompletion, Usage
from baton.gateway.sse import Envelope, json_text


class ChatStream(StreamAnswer):
    """Chunks: a role for every choice, deltas, each choice's end, the usage."""

    def __init__(
        self,
        exchange: Exchange,
        meter: AnswerMeter,
        envelope: Envelope,
        num_choices: int,
        num_prompt_tokens: int,
        num_top: int,
    ) -> None:
        super().__init__(exchange, meter, envelope, num_choices)
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._num_top = num_top
        self._before_text = [b'%b{"index":%d,"delta":{"content":' % (self.head, index) for index in range(num_choices)]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self.tail

    def opening(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, delta, b"null", b"null") for index in range(self._num_choices))

    def piece(self, index: int, delta: Delta) -> bytes:
        if self.envelope.continuous_usage or delta.logprobs is not None:
            return self._rich_piece(index, delta)
        text = delta.text
        return self._before_text[index] + json_text(text) + self._after_text if text else b""

    def ending(self, index: int, delta: Delta) -> bytes:
        return self._chunk(index, b"{}", b"null", json_text(delta.finish_reason), json_text(delta.stop_reason))

    def _rich_piece(self, index: int, delta: Delta) -> bytes:
        self._num_output_tokens += len(delta.token_ids)
        if not delta.text and not delta.logprobs:
            return b""
        logprobs = msgspec.json.encode(chat_logprobs(delta.logprobs, self._num_top)) if delta.logprobs else b"null"
        return self._chunk(index, b'{"content":%b}' % json_text(delta.text), logprobs, b"null")

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish: bytes, stop: bytes = b"") -> bytes:
        tail = self.tail
        if self.envelope.continuous_usage:
            tail = self.envelope.tail_with(usage_of(self._num_prompt_tokens, self._num_output_tokens, 0))
        stop = b',"stop_reason":' + stop if stop else b""
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, finish, stop)
        return self.head + choice + tail


@dataclass(frozen=True, slots=True)
class ChatExtras:
    """What a document holds where it is asked for."""

    prompt_token_ids: list[int] | None = None  # the choices' token ids too
    prompt_logprobs: bool = False


class ChatDocument(Answer):
    """One chat.completion."""

    extras = ChatExtras()

    def __init__(
        self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, num_choices: int, num_top: int | None
    ) -> None:
        super().__init__(exchange, meter)
        self._envelope = envelope
        self._num_top = num_top
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._ends: list[Delta | None] = [None] * num_choices
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._prompt_logprobs: list[TokenLogprob] = []

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.token_ids:
            self.meter.on_tokens(index)
            if self.extras.prompt_token_ids is not None:
                self._token_ids[index].extend(delta.token_ids)
        self._texts[index].append(delta.text)
        if delta.logprobs:
            self._logprobs[index].extend(delta.logprobs)
        if delta.finish_reason is not None:
            self._ends[index] = delta

    def finish(self, usage: Usage) -> None:
        envelope = self._envelope
        document = ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(index) for index in range(len(self._texts))],
            system_fingerprint=envelope.system_fingerprint,
            usage=usage,
            prompt_token_ids=UNSET if self.extras.prompt_token_ids is None else self.extras.prompt_token_ids,
            prompt_logprobs=prompt_logprobs(self._prompt_logprobs) if self.extras.prompt_logprobs else UNSET,
        )
        self.exchange.respond(200, msgspec.json.encode(document))

    def _message(self, index: int) -> ChatAnswer:
        return ChatAnswer(content="".join(self._texts[index]))

    def _choice(self, index: int) -> ChatChoice:
        end = self._ends[index]
        return ChatChoice(
            index=index,
            message=self._message(index),
            logprobs=None if self._num_top is None else chat_logprobs(self._logprobs[index], self._num_top),
            finish_reason=end.finish_reason if end is not None else None,
            stop_reason=end.stop_reason if end is not None else None,
            token_ids=UNSET if self.extras.prompt_token_ids is None else self._token_ids[index],
        )
