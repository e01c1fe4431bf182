"""POST /v1/completions: prompts of four forms, n choices each, and the answer's two forms."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton.gateway.answer import Answer, StreamAnswer, usage_of
from baton.gateway.front_desk import FrontDesk, envelope_of
from baton.gateway.generation import Delta, TokenLogprob
from baton.gateway.http_exchange import Exchange
from baton.gateway.metrics import AnswerMeter
from baton.gateway.openai_logprobs import CompletionLogprobColumns
from baton.gateway.openai_types import Completion, CompletionChoice, CompletionRequest, Usage
from baton.gateway.request_body import BodyDecoder
from baton.gateway.sampling_defaults import check_prompt_ids
from baton.gateway.served_model import ServedModel
from baton.gateway.sse import Envelope, json_text
from baton.gateway.structured_output import constraint_of
from baton.gateway.validation import (
    DEFAULT_COMPLETION_TOKENS,
    Prompt,
    check_completion,
    check_context,
    check_for_model,
    prompts_of,
    sampling_of,
    stop_of,
)
from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    token_ids: list[int]
    echo: str  # the text that goes before the answer


class Completions:
    """The route's handler."""

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self._decoder = BodyDecoder(CompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        desk, config = self._desk, self._desk.config
        with desk.refusals_counted():
            request = self._decoder.decode(exchange.body, exchange.headers)
            check_completion(request, config.max_choices, config.max_logprobs, config.max_prompts)
            asked = constraint_of(request)
            model = desk.catalog.get(request.model or "")
            info = model.require_info()
            check_for_model(request, info)
            sources = prompts_of(request)
            n = request.n or 1
            request_id = desk.take_place(exchange, request, n * len(sources))
            prompts = []
            for source in sources:
                prompts.append(await _encode(model, request, source, info))
        answer = self._answer(exchange, model, request, prompts)
        if request.max_tokens == 0:
            _echo_only(answer, prompts, n)
            return
        sampling = sampling_of(request, request.logprobs)
        stop = stop_of(request, DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens)
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-p{index}" for index in range(len(prompts))]
        generations = [
            desk.generation_request(exchange, name, model, request, prompt.token_ids, sampling, stop, asked=asked)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        await answer.run(desk.generator, generations)

    def _answer(
        self, exchange: Exchange, model: ServedModel, request: CompletionRequest, prompts: list[_EncodedPrompt]
    ) -> CompletionStream | CompletionDocument:
        envelope = envelope_of("text_completion", "cmpl", exchange, model, request)
        echoes = [prompt.echo for prompt in prompts for _ in range(request.n or 1)]
        meter = self._desk.meter(exchange, len(echoes))
        if not request.stream:
            return CompletionDocument(exchange, meter, envelope, echoes, request.logprobs)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return CompletionStream(exchange, meter, envelope, echoes, num_prompt_tokens, request.logprobs or 0)


async def _encode(
    model: ServedModel, request: CompletionRequest, prompt: Prompt, info: types_pb2.ModelInfo
) -> _EncodedPrompt:
    if isinstance(prompt, str):
        token_ids = await model.encode_text(prompt, add_special_tokens=request.add_special_tokens is not False)
        check_context(len(token_ids), info.max_model_len, "prompt")
        return _EncodedPrompt(token_ids, prompt if request.echo else "")
    check_context(len(prompt), info.max_model_len, "prompt")
    check_prompt_ids(prompt, info.vocab_size)
    return _EncodedPrompt(prompt, model.tokenizer.decode(prompt) if request.echo else "")


def _echo_only(answer: CompletionStream | CompletionDocument, prompts: list[_EncodedPrompt], n: int) -> None:
    """max_tokens 0: the prompts come back, and no worker is asked."""
    for index in range(n * len(prompts)):
        answer.deliver(index, Delta(index, "", (), None, "length", None))
    answer.finish(usage_of(sum(len(prompt.token_ids) for prompt in prompts), 0, 0))


class CompletionStream(StreamAnswer):
    """Chunks of text, choice by choice as they come."""

    def __init__(
        self,
        exchange: Exchange,
        meter: AnswerMeter,
        envelope: Envelope,
        echoes: list[str],
        num_prompt_tokens: int,
        num_top: int,
    ) -> None:
        super().__init__(exchange, meter, envelope, len(echoes))
        self._echoes = echoes
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._logprobs = [CompletionLogprobColumns(num_top, len(echo)) for echo in echoes]
        self._before_text = [b'%b{"index":%d,"text":' % (self.head, index) for index in range(len(echoes))]
        self._after_text = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self.tail

    def opening(self) -> bytes:
        chunks = (
            self._chunk(index, json_text(echo), b"null", b"null", b"null")
            for index, echo in enumerate(self._echoes)
            if echo
        )
        return b"".join(chunks)

    def piece(self, index: int, delta: Delta) -> bytes:
        if self.envelope.continuous_usage or delta.logprobs is not None:
            return self._rich_piece(index, delta)
        text = delta.text
        return self._before_text[index] + json_text(text) + self._after_text if text else b""

    def ending(self, index: int, delta: Delta) -> bytes:
        return self._chunk(index, b'""', b"null", json_text(delta.finish_reason), json_text(delta.stop_reason))

    def _rich_piece(self, index: int, delta: Delta) -> bytes:
        self._num_output_tokens += len(delta.token_ids)
        if not delta.text and not delta.logprobs:
            return b""
        columns = self._logprobs[index].columns(delta.logprobs) if delta.logprobs else None
        return self._chunk(index, json_text(delta.text), msgspec.json.encode(columns), b"null", b"null")

    def _chunk(self, index: int, text: bytes, logprobs: bytes, finish: bytes, stop: bytes) -> bytes:
        tail = self.tail
        if self.envelope.continuous_usage:
            tail = self.envelope.tail_with(usage_of(self._num_prompt_tokens, self._num_output_tokens, 0))
        form = b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}%b'
        return form % (self.head, index, text, logprobs, finish, stop, tail)


class CompletionDocument(Answer):
    """One text_completion."""

    def __init__(
        self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, echoes: list[str], num_top: int | None
    ) -> None:
        super().__init__(exchange, meter)
        self._envelope = envelope
        self._num_top = num_top
        self._echoes = echoes
        self._texts: list[list[str]] = [[echo] for echo in echoes]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in echoes]
        self._ends: list[Delta | None] = [None] * len(echoes)

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
        document = Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            system_fingerprint=envelope.system_fingerprint,
            choices=[self._choice(index) for index in range(len(self._texts))],
            usage=usage,
        )
        self.exchange.respond(200, msgspec.json.encode(document))

    def _choice(self, index: int) -> CompletionChoice:
        end = self._ends[index]
        logprobs = None
        if self._num_top is not None:
            columns = CompletionLogprobColumns(self._num_top, len(self._echoes[index]))
            logprobs = columns.columns(self._logprobs[index])
        return CompletionChoice(
            index=index,
            text="".join(self._texts[index]),
            logprobs=logprobs,
            finish_reason=end.finish_reason if end is not None else None,
            stop_reason=end.stop_reason if end is not None else None,
        )
