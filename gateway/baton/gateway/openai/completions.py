"""POST /v1/completions: reads and validates requests with prompts of four forms and n choices each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.core import Delta
from baton.gateway.fields.adopted import adopt, requested_constraint
from baton.gateway.fields.completion import DEFAULT_COMPLETION_TOKENS, Prompt, check_completion, prompts_of
from baton.gateway.fields.neutral import drop_neutral
from baton.gateway.fields.sampling import sampling_of, stop_of, truncated
from baton.gateway.fields.validation import check_context, check_for_model, expand_logprobs
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.sampling import check_prompt_ids
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import check_generates
from baton.gateway.openai.completion_answer import CompletionDocument, CompletionForm, CompletionStream, EncodedPrompt
from baton.gateway.openai.logprobs import form_of
from baton.gateway.schemas.requests import CompletionRequest
from baton.gateway.serving.answer import usage_of
from baton.gateway.serving.answer_size import check_echo, limit_logprobs
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_MAX_TOKENS = 320 << 10  # encoded for all prompts together: 0.4 s of work. A single prompt may fill the context
_ID_CHARS = 6  # characters per token id in JSON


@dataclass(frozen=True, slots=True)
class CheckedCompletion:
    """A validated request."""

    request: CompletionRequest
    requested: RequestedConstraint | None
    model: ServedModel
    sources: list[Prompt]


class Completions:
    """Handles POST /v1/completions."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(CompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections():
            checked = await serving.bodies.run(partial(self._check, exchange), exchange.num_body_bytes, exchange.owner)
            request, model, sources = checked.request, checked.model, checked.sources
            info = model.require_info()
            n = request.best_of or request.n or 1
            request_id = serving.admit(exchange, request, n * len(sources))
            prompts = await encode_all(model, request, sources, n)
        form = _form_of(request, prompts)
        answer = self._answer(exchange, model, request, form)
        sampling = sampling_of(request, request.logprobs)
        if form.echo_logprobs and not sampling.HasField("prompt_logprobs"):
            sampling.prompt_logprobs = request.logprobs or 0
        if form.scoring and not sampling.HasField("prompt_logprobs"):
            _echo_only(answer, prompts, n)
            return
        max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        # If only the prompt is scored, the single output token is dropped.
        stop = stop_of(request, max(1, max_tokens))
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-p{index}" for index in range(len(prompts))]
        generations = []
        for name, prompt in zip(names, prompts, strict=True):
            await asyncio.sleep(0)
            generation = serving.generation_request(
                exchange,
                name,
                model,
                request,
                prompt.token_ids,
                sampling,
                stop,
                requested=checked.requested,
                whole=not request.stream,
            )
            generations.append(generation if generation.n == n else replace(generation, n=n))
        if form.kept is not None and request.logprobs is None:
            sampling.logprobs = 0  # needed to rank the choices; not returned
        if form.logprobs is not None or form.prompt_logprobs:
            generations = limit_logprobs(generations, info.max_model_len)
        await answer.run(serving.admitted(exchange, serving.generator_for(request), generations), generations)

    def _check(self, exchange: Exchange) -> CheckedCompletion:
        return checked_completion(self._serving, exchange, self._decoder.read(exchange))

    def _answer(
        self, exchange: Exchange, model: ServedModel, request: CompletionRequest, form: CompletionForm
    ) -> CompletionStream | CompletionDocument:
        envelope = self._serving.envelope("text_completion", "cmpl", exchange, model, request)
        meter = self._serving.meter(exchange, form.num_choices)
        kind = CompletionStream if request.stream else CompletionDocument
        return kind(exchange, meter, envelope, form)


def checked_completion(serving: ServingContext, exchange: Exchange, request: CompletionRequest) -> CheckedCompletion:
    """Returns the validated request; runs on another thread if it is large. Raises ServiceError."""
    config = serving.config
    exchange.ignore(adopt(request))
    drop_neutral(request)
    check_completion(request, config.max_choices, config.most_logprobs, config.max_prompts)
    requested = requested_constraint(request)
    model = serving.model(exchange, request.model)
    info = model.require_info()
    check_generates(model.name, info)
    check_for_model(request, info)
    expand_logprobs(request, info.vocab_size)
    sources = prompts_of(request)
    if len(sources) > 1:  # a single prompt that is too long has its own error
        _check_sum(sum(_fewest_tokens(model, source) for source in sources), _most_tokens(info))
    return CheckedCompletion(request, requested, model, sources)


def _check_sum(num_tokens: int, most: int) -> None:
    if num_tokens > most:
        raise InvalidRequest(
            f"the prompts have at least {num_tokens} tokens together; at most {most} are allowed",
            field="prompt",
        )


def _form_of(request: CompletionRequest, prompts: list[EncodedPrompt]) -> CompletionForm:
    n = request.n or 1
    return CompletionForm(
        prompts=prompts,
        n=request.best_of or n,
        logprobs=form_of(request, request.logprobs),
        kept=n if request.best_of and request.best_of > n else None,
        echo_logprobs=bool(request.echo) and request.logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
        return_token_ids=bool(request.return_token_ids),
        scoring=request.max_tokens == 0,
    )


async def encode_all(
    model: ServedModel, request: CompletionRequest, sources: Sequence[Prompt], n: int
) -> list[EncodedPrompt]:
    """Encodes the prompts. Raises InvalidRequest for too many tokens, including those that truncation drops."""
    info = model.require_info()
    most = _most_tokens(info)
    prompts: list[EncodedPrompt] = []
    num_tokens = num_echoed = 0
    for source in sources:
        await asyncio.sleep(0)  # short prompts are encoded here, so other tasks run in between
        token_ids = await _token_ids_of(model, request, source, info)
        num_tokens += len(token_ids)
        _check_sum(num_tokens, most)
        prompt = await _encoded(model, request, source, token_ids, info)
        prompts.append(prompt)
        num_echoed += n * (len(prompt.echo) + (_ID_CHARS * len(prompt.token_ids) if request.return_token_ids else 0))
        check_echo(num_echoed)
    return prompts


def _most_tokens(info: types_pb2.ModelInfo) -> int:
    return max(_MAX_TOKENS, info.max_model_len)


def _fewest_tokens(model: ServedModel, prompt: Prompt) -> int:
    return model.tokenizer.bound.fewest(prompt) if isinstance(prompt, str) else len(prompt)


async def _token_ids_of(
    model: ServedModel, request: CompletionRequest, prompt: Prompt, info: types_pb2.ModelInfo
) -> list[int]:
    if isinstance(prompt, str):
        return await model.encode_text(
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            whole=request.truncate_prompt_tokens is not None,
        )
    check_context(0 if request.truncate_prompt_tokens else len(prompt), info.max_model_len, "prompt")
    check_prompt_ids(prompt, info.vocab_size)
    return prompt


async def _encoded(
    model: ServedModel,
    request: CompletionRequest,
    prompt: Prompt,
    token_ids: list[int],
    info: types_pb2.ModelInfo,
) -> EncodedPrompt:
    kept = truncated(token_ids, request, info.max_model_len)
    check_context(len(kept), info.max_model_len, "prompt")
    if not request.echo:
        return EncodedPrompt(kept, "", "")
    is_whole = len(kept) == len(token_ids)
    text = prompt if isinstance(prompt, str) and is_whole else await model.tokenizer.decode_async(kept)
    return EncodedPrompt(kept, text, model.tokenizer.token_text(kept[0]) if kept else "")


def _echo_only(answer: CompletionStream | CompletionDocument, prompts: list[EncodedPrompt], n: int) -> None:
    """Answers max_tokens=0 with the echoed prompts, without a worker."""
    for index in range(n * len(prompts)):
        answer.deliver(index, Delta(index, "", (), None, "length", None))
    answer.finish(usage_of(sum(len(prompt.token_ids) for prompt in prompts), 0, 0))
