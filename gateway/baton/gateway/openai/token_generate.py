"""POST /inference/v1/generate: token ids in and out, without text, templates or stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace as replaced

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.core import Delta, TokenLogprob
from baton.gateway.fields.adopted import adopt, requested_constraint
from baton.gateway.fields.neutral import drop_neutral
from baton.gateway.fields.sampling import sampling_of, stop_of
from baton.gateway.fields.validation import (
    check_context,
    check_fields,
    check_for_model,
    check_logprob_token_ids,
    check_logprobs,
    expand_logprobs,
    refuse_unserved,
)
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.logprob_json import chat_json, count_of, prompt_json, raw
from baton.gateway.openai.logprobs import LogprobForm, form_of
from baton.gateway.rest.large_answer import LargeAnswer
from baton.gateway.rest.routing import Route
from baton.gateway.rest.sse import DONE, Envelope
from baton.gateway.schemas.answers import ChatLogprobs, PromptLogprobs, Usage
from baton.gateway.schemas.foreign_fields import CHANGING, REFUSED
from baton.gateway.schemas.requests import (
    Count,
    CountOrAll,
    GenerationFields,
    PrintableId,
    Salt,
    StreamOptions,
    TokenId,
)
from baton.gateway.serving.affinity import PLACING
from baton.gateway.serving.answer import Answer, StreamAnswer, usage_of
from baton.gateway.serving.chat import fields_named, rename_field
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.reasoning_limit import limit_reasoning
from baton.rpc.errors import InvalidRequest, ServiceError

_NESTED = "sampling_params"


class TokenSampling(GenerationFields, kw_only=True):
    """Sampling parameters and stop conditions."""

    max_tokens: Count | None = None  # null: up to the context's length
    logprobs: CountOrAll | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no limit


class TokenGenerateRequest(Struct, kw_only=True):
    """POST /inference/v1/generate."""

    CHANGING: ClassVar = CHANGING

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    sampling_params: TokenSampling | None = None
    model: str | None = None  # null: the only served model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: PrintableId | None = None
    assistant_tokens_mask: list[int] | None = None  # of a rendered chat, for its trainer; not used here
    features: Annotated[dict[str, Any] | None, REFUSED] = None
    kv_transfer_params: Annotated[dict[str, Any] | None, REFUSED] = None


class TokenChoice(Struct, kw_only=True):
    """One choice, or a piece of it in a stream."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class TokenGeneration(Struct, kw_only=True):
    """The response, or one event of a stream."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    usage: Usage | None = None


# Maps the generator's field names to those of this API. Some fields are at the request's top level.
_OWN = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id")
_FIELDS = {name: f"{_NESTED}.{name}" for name in TokenSampling.__struct_fields__ if name not in _OWN}
_FIELDS["prompt"] = "token_ids"


@dataclass(frozen=True, slots=True)
class _Checked:
    """A validated request."""

    request: TokenGenerateRequest
    fields: TokenSampling
    requested: RequestedConstraint | None
    model: ServedModel


class TokenGenerate:
    """Handles POST /inference/v1/generate."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(TokenGenerateRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections(), fields_named(_FIELDS):
            checked = await serving.bodies.run(partial(self._check, exchange), exchange.num_body_bytes, exchange.owner)
            request, fields, model = checked.request, checked.fields, checked.model
            n = fields.n or 1
            request_id = serving.admit(exchange, fields, n)
            sampling, stop = sampling_of(fields, fields.logprobs), stop_of(fields, fields.max_tokens)
            limit_reasoning(sampling, model, request.token_ids, fields.thinking_token_budget)
        generation = serving.generation_request(
            exchange,
            request_id,
            model,
            fields,
            request.token_ids,
            sampling,
            stop,
            requested=checked.requested,
            whole=not request.stream,
        )
        meter = serving.meter(exchange, n)
        answer: Answer
        if request.stream:
            answer = TokenStream(exchange, meter, fields, len(request.token_ids), serving.includes_usage(fields))
        else:
            answer = TokenDocument(exchange, meter, fields)
        generations = [replace(generation, detokenize=False)]
        await answer.run(serving.admitted(exchange, serving.generator_for(fields), generations), generations)

    def _check(self, exchange: Exchange) -> _Checked:
        """Reads and validates the request; runs on another thread if it is large. Raises ServiceError."""
        serving, request = self._serving, self._decoder.read(exchange)
        refuse_unserved(request, ("features", "kv_transfer_params"))
        fields = _fields_of(request)
        exchange.ignore([f"{_NESTED}.{name}" for name in adopt(fields)])
        drop_neutral(fields)
        model = serving.model(exchange, request.model)
        info = model.require_info()
        _check(fields, serving)
        check_for_model(fields, info)
        expand_logprobs(fields, info.vocab_size)
        check_context(len(request.token_ids), info.max_model_len, "token_ids")
        check_prompt_ids(request.token_ids, info.vocab_size)
        return _Checked(request, fields, requested_constraint(fields), model)


class TokenStream(StreamAnswer):
    """Streams one event per delta."""

    def __init__(
        self,
        exchange: Exchange,
        meter: AnswerMeter,
        fields: TokenSampling,
        num_prompt_tokens: int,
        includes_usage: bool,
    ) -> None:
        options = fields.stream_options or StreamOptions()
        self._continuous_usage = bool(options.continuous_usage_stats)
        envelope = Envelope("", exchange.request_id, 0, "", "", includes_usage, self._continuous_usage)
        super().__init__(exchange, meter, envelope, fields.n or 1)
        self._form = form_of(fields, fields.logprobs) or LogprobForm()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0

    def fail(self, error: Exception) -> None:
        super().fail(_renamed(error))

    def piece(self, index: int, delta: Delta) -> bytes:
        if not delta.token_ids:
            return b""
        self._num_output_tokens += len(delta.token_ids)
        logprobs = raw(chat_json(delta.logprobs, self._form)) if delta.logprobs else None
        return self._event([TokenChoice(index=index, token_ids=list(delta.token_ids), logprobs=logprobs)])

    def ending(self, index: int, delta: Delta) -> bytes:
        end = TokenChoice(index=index, token_ids=[], finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        return self._event([end])

    def finish(self, usage: Usage) -> None:
        last = self._event([], usage) if self.envelope.include_usage else b""
        self.exchange.end(self._held + last + DONE)

    def _event(self, choices: Sequence[TokenChoice], usage: Usage | None = None) -> bytes:
        if usage is None and self._continuous_usage:
            usage = usage_of(self._num_prompt_tokens, self._num_output_tokens, 0)
        event = TokenGeneration(request_id=self.exchange.request_id, choices=list(choices), usage=usage)
        return b"data: %b\n\n" % msgspec.json.encode(event)


class TokenDocument(Answer):
    """Collects one document."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, fields: TokenSampling) -> None:
        super().__init__(exchange, meter)
        self._fields = fields
        self._choices = [TokenChoice(index=index, token_ids=[]) for index in range(fields.n or 1)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in self._choices]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_logprobs = 0
        self._large = LargeAnswer(exchange)

    def deliver(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
            self._num_logprobs += count_of(delta.prompt_logprobs)
        if delta.token_ids:
            self.meter.on_tokens(index, len(delta.token_ids))
            choice.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self._logprobs[index].extend(delta.logprobs)
            self._num_logprobs += count_of(delta.logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def fail(self, error: Exception) -> None:
        super().fail(_renamed(error))

    def finish(self, usage: Usage) -> None:
        self._large.respond(lambda: self._body(usage), self._num_logprobs)

    def _body(self, usage: Usage) -> bytes:
        fields = self._fields
        form = form_of(fields, fields.logprobs)
        choices = self._choices
        if form is not None:
            written = [raw(chat_json(entries, form)) for entries in self._logprobs]
            choices = [replaced(choice, logprobs=one) for choice, one in zip(choices, written, strict=True)]
        requested = fields.prompt_logprobs is not None
        document = TokenGeneration(
            request_id=self.exchange.request_id,
            choices=choices,
            prompt_logprobs=raw(prompt_json(self._prompt_logprobs)) if requested else None,
            usage=usage,
        )
        return msgspec.json.encode(document)


def _renamed(error: Exception) -> Exception:
    if isinstance(error, ServiceError):
        rename_field(error, _FIELDS)
    return error


def token_routes(serving: ServingContext) -> list[Route]:
    """Returns the routes of the token API."""
    return [
        Route(
            "POST",
            "/inference/v1/generate",
            TokenGenerate(serving),
            "Generates tokens after token ids.",
            TokenGenerateRequest,
            TokenGeneration,
            TokenGeneration,
            errors=(400, 404, 408, 413, 429, 500, 503, 504),
            parameters=PLACING,
        )
    ]


def _fields_of(request: TokenGenerateRequest) -> TokenSampling:
    """Returns the sampling parameters, completed with the request's top-level fields."""
    fields = request.sampling_params or TokenSampling()
    given = {
        name: getattr(request, name) for name in ("stream", "stream_options", "cache_salt", "priority", "request_id")
    }
    return msgspec.structs.replace(fields, **{name: value for name, value in given.items() if value is not None})


def _check(fields: TokenSampling, serving: ServingContext) -> None:
    if fields.stop:
        raise InvalidRequest("stop is not supported by this API; give stop_token_ids", field=f"{_NESTED}.stop")
    if fields.logprobs is not None:
        check_logprobs(f"{_NESTED}.logprobs", fields.logprobs, serving.config.most_logprobs)
    check_fields(fields, serving.config.max_choices, serving.config.most_logprobs)
    check_logprob_token_ids(fields, fields.logprobs, "logprobs")
