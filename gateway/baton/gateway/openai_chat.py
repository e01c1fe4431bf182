"""POST /v1/chat/completions: the request's way in, and the answer's two forms."""

from __future__ import annotations

import msgspec

from baton.gateway.answer import Answer, StreamAnswer, usage_of
from baton.gateway.front_desk import FrontDesk, envelope_of
from baton.gateway.generation import Delta, TokenLogprob
from baton.gateway.http_exchange import Exchange
from baton.gateway.metrics import AnswerMeter
from baton.gateway.openai_logprobs import chat_logprobs
from baton.gateway.openai_types import (
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    Usage,
)
from baton.gateway.request_body import BodyDecoder
from baton.gateway.served_model import ServedModel
from baton.gateway.sse import Envelope, json_text
from baton.gateway.validation import (
    chat_num_logprobs,
    check_chat,
    check_chat_size,
    check_context,
    check_for_model,
    sampling_of,
    stop_of,
    template_messages,
    template_variables,
)
from baton.rpc.errors import ServiceError

# The generation side's names for what chats call otherwise.
_FIELDS = {"prompt": "messages", "logprobs": "top_logprobs"}


class ChatCompletions:
    """The route's handler."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self._decoder = BodyDecoder(ChatCompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        desk = self._desk
        with desk.refusals_counted():
            request = self._decoder.decode(exchange.body, exchange.headers)
            check_chat(request, desk.config.max_choices, desk.config.max_logprobs)
            model = desk.catalog.get(request.model or "")
            info = model.require_info()
            check_for_model(request, info)
            check_chat_size(request.messages, info.max_model_len)
            n = request.n or 1
            request_id = desk.take_place(exchange, request, n)
            token_ids = await _encode(model, request)
            check_context(len(token_ids), info.max_model_len, "messages")
        num_logprobs = chat_num_logprobs(request)
        sampling = sampling_of(request, num_logprobs)
        stop = stop_of(request, request.max_completion_tokens or request.max_tokens or desk.config.default_max_tokens)
        generation = desk.generation_request(exchange, request_id, model, request, token_ids, sampling, stop)
        meter = desk.meter(exchange, n)
        answer: Answer
        if request.stream:
            envelope = envelope_of("chat.completion.chunk", "chatcmpl", exchange, model, request)
            answer = ChatStream(exchange, meter, envelope, n, len(token_ids), num_logprobs or 0)
        else:
            envelope = envelope_of("chat.completion", "chatcmpl", exchange, model, request)
            answer = ChatDocument(exchange, meter, envelope, n, num_logprobs)
        await answer.run(desk.generator, [generation])


async def _encode(model: ServedModel, request: ChatCompletionRequest) -> list[int]:
    going_on = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    try:
        return await model.encode_chat(
            template_messages(request.messages),
            add_generation_prompt=not going_on if add_prompt is None else add_prompt,
            continue_final_message=going_on,
            documents=request.documents,
            variables=template_variables(request),
            add_special_tokens=bool(request.add_special_tokens),
        )
    except ServiceError as error:
        error.field = _FIELDS.get(error.field, error.field)
        raise


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


class ChatDocument(Answer):
    """One chat.completion."""

    def __init__(
        self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, num_choices: int, num_top: int | None
    ) -> None:
        super().__init__(exchange, meter)
        self._envelope = envelope
        self._num_top = num_top
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]
        self._ends: list[Delta | None] = [None] * num_choices

    def deliver(self, index: int, delta: Delta) -> None:
        if delta.token_ids:
            self.meter.on_tokens(index)
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
        )
        self.exchange.respond(200, msgspec.json.encode(document))

    def _choice(self, index: int) -> ChatChoice:
        end = self._ends[index]
        return ChatChoice(
            index=index,
            message=ChatAnswer(content="".join(self._texts[index])),
            logprobs=None if self._num_top is None else chat_logprobs(self._logprobs[index], self._num_top),
            finish_reason=end.finish_reason if end is not None else None,
            stop_reason=end.stop_reason if end is not None else None,
        )
