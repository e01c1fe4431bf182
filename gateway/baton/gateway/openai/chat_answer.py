"""The two forms of a chat's response if all text is the answer: streamed chunks, or one document."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from baton.gateway.core import Delta, TokenLogprob
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.openai.logprob_json import chat_json, count_of, prompt_json, raw
from baton.gateway.openai.logprobs import LogprobForm, chat_logprobs, prompt_logprobs
from baton.gateway.rest.large_answer import LargeAnswer
from baton.gateway.rest.sse import Envelope, json_text
from baton.gateway.schemas.answers import ChatAnswer, ChatChoice, ChatCompletion, Usage
from baton.gateway.serving.answer import Answer, StreamAnswer, usage_of


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The members of a response, as its request asks."""

    num_choices: int
    num_prompt_tokens: int
    logprobs: LogprobForm | None = None  # None: without log-probabilities
    prompt_token_ids: list[int] | None = None  # if given, choices have token ids too; empty: choices alone
    prompt_text: str | None = None
    assistant_mask: list[int] | None = None  # 1 for each token of the prompt that is the assistant's
    prompt_logprobs: bool = False  # documents only
    echo: str = ""  # text before every choice's output
    function_call: bool = False  # whether calls have the deprecated form

    @property
    def token_ids(self) -> bool:
        """Returns whether choices contain their token ids."""
        return self.prompt_token_ids is not None

    @property
    def of_prompt(self) -> bytes:
        """Returns the additional members of the first chunk."""
        members = b"" if self.prompt_token_ids is None else b',"prompt_token_ids":%b' % json_of(self.prompt_token_ids)
        if self.prompt_text is not None:
            members += b',"prompt_text":%b' % json_text(self.prompt_text)
        if self.assistant_mask is not None:
            members += b',"assistant_tokens_mask":%b' % json_of(self.assistant_mask)
        return members

    def finish_reason(self, end: Delta | None) -> str | None:
        """Returns the finish reason for the client."""
        reason = None if end is None else end.finish_reason
        return "function_call" if reason == "tool_calls" and self.function_call else reason


json_of = msgspec.json.encode


class ChatStream(StreamAnswer):
    """Streams chunks: a role for every choice, deltas, each choice's end, the usage."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, shape: ChatShape) -> None:
        super().__init__(exchange, meter, envelope, shape.num_choices)
        self._shape = shape
        self._num_output_tokens = 0
        self._form = shape.logprobs or LogprobForm()
        self._rich = self.envelope.continuous_usage or shape.token_ids
        before = b'%b{"index":%d,"delta":{"content":'
        self._before_text = [before % (self.head, index) for index in range(shape.num_choices)]
        self._after_text = b'},"logprobs":null,"finish_reason":null}' + self.tail

    def opening(self) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        shape = self._shape
        chunks = [
            self._chunk(index, delta, b"null", b"null", of_all=b"" if index else shape.of_prompt)
            for index in range(shape.num_choices)
        ]
        if shape.echo:
            echoed = b'{"content":%b}' % json_text(shape.echo)
            chunks += [self._chunk(index, echoed, b"null", b"null") for index in range(shape.num_choices)]
        return b"".join(chunks)

    def piece(self, index: int, delta: Delta) -> bytes:
        if self._rich or delta.logprobs is not None:
            return self._rich_piece(index, delta)
        text = delta.text
        return self._before_text[index] + json_text(text) + self._after_text if text else b""

    def ending(self, index: int, delta: Delta) -> bytes:
        reason = self._shape.finish_reason(delta)
        return self._chunk(index, b"{}", b"null", json_text(reason), json_text(delta.stop_reason))

    def _rich_piece(self, index: int, delta: Delta) -> bytes:
        self._num_output_tokens += len(delta.token_ids)
        more = self._token_ids(delta)
        if not delta.text and not delta.logprobs and not more:
            return b""
        logprobs = chat_json(delta.logprobs, self._form) if delta.logprobs else b"null"
        return self._chunk(index, b'{"content":%b}' % json_text(delta.text), logprobs, b"null", more=more)

    def _token_ids(self, delta: Delta) -> bytes:
        """Returns a choice's token_ids member, or nothing if it was not requested or the delta has no tokens."""
        if not self._shape.token_ids or not delta.token_ids:
            return b""
        return b',"token_ids":%b' % json_of(list(delta.token_ids))

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes,
        finish: bytes,
        stop: bytes = b"",
        more: bytes = b"",
        of_all: bytes = b"",
    ) -> bytes:
        """Returns a chunk. `more` are members of the choice, `of_all` of the chunk."""
        tail = self.tail
        if self.envelope.continuous_usage:
            tail = self.envelope.tail_with(usage_of(self._shape.num_prompt_tokens, self._num_output_tokens, 0))
        if of_all:
            tail = tail[:1] + of_all + tail[1:]  # after the list of choices
        stop = b',"stop_reason":' + stop if stop else b""
        form = b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b}%b'
        return form % (self.head, index, delta, logprobs, finish, stop, more, tail)


class ChatDocument(Answer):
    """Collects one chat.completion document."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, shape: ChatShape) -> None:
        super().__init__(exchange, meter)
        num_choices = shape.num_choices
        self._envelope = envelope
        self._shape = shape
        self._form = shape.logprobs
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._ends: list[Delta | None] = [None] * num_choices
        self._token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_logprobs = 0
        self._large = LargeAnswer(exchange)

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.token_ids:
            self.meter.on_tokens(index, len(delta.token_ids))
        self.collect(index, delta)

    def collect(self, index: int, delta: Delta) -> None:
        """Adds a delta without counting its tokens."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
            self._num_logprobs += count_of(delta.prompt_logprobs)
        if self._shape.token_ids:
            self._token_ids[index].extend(delta.token_ids)
        self._texts[index].append(delta.text)
        if delta.logprobs:
            self._logprobs[index].extend(delta.logprobs)
            self._num_logprobs += count_of(delta.logprobs)
        if delta.finish_reason is not None:
            self._ends[index] = delta

    def finish(self, usage: Usage) -> None:
        self._large.respond(lambda: self._body(usage), self._num_logprobs)

    def _body(self, usage: Usage) -> bytes:
        """Returns the document as JSON. Log-probabilities are encoded piece by piece."""
        document = self._document(usage, [])
        if self._shape.prompt_logprobs:
            document.prompt_logprobs = raw(prompt_json(self._prompt_logprobs))
        if self._form is not None:
            for choice, entries in zip(document.choices, self._logprobs, strict=True):
                choice.logprobs = raw(chat_json(entries, self._form))
                entries.clear()
        return msgspec.json.encode(document)

    def document(self, usage: Usage) -> ChatCompletion:
        """Returns the complete document."""
        document = self._document(usage, self._prompt_logprobs)
        if self._form is not None:
            for choice, entries in zip(document.choices, self._logprobs, strict=True):
                choice.logprobs = chat_logprobs(entries, self._form)
        return document

    def _document(self, usage: Usage, prompt: list[TokenLogprob]) -> ChatCompletion:
        """Returns the document without the choices' log-probabilities."""
        envelope, shape = self._envelope, self._shape
        return ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(index) for index in range(len(self._texts))],
            system_fingerprint=envelope.system_fingerprint,
            usage=usage,
            prompt_token_ids=shape.prompt_token_ids or UNSET,
            prompt_text=UNSET if shape.prompt_text is None else shape.prompt_text,
            assistant_tokens_mask=UNSET if shape.assistant_mask is None else shape.assistant_mask,
            prompt_logprobs=prompt_logprobs(prompt) if shape.prompt_logprobs else UNSET,
            metrics=self.metrics(envelope, usage),
        )

    def _message(self, index: int) -> ChatAnswer:
        return ChatAnswer(content="".join(self._texts[index]))

    def _choice(self, index: int) -> ChatChoice:
        end = self._ends[index]
        message = self._message(index)
        if self._shape.echo:
            message.content = self._shape.echo + (message.content or "")
        return ChatChoice(
            index=index,
            message=message,
            logprobs=None,
            finish_reason=self._shape.finish_reason(end),
            stop_reason=end.stop_reason if end is not None else None,
            token_ids=self._token_ids[index] if self._shape.token_ids else UNSET,
        )
