"""POST /v1/chat/completions/render and /v1/completions/render: the requests of token ids that texts stand for."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.fields.chat import chat_num_logprobs
from baton.gateway.fields.completion import DEFAULT_COMPLETION_TOKENS
from baton.gateway.fields.sampling import sampling_of, stop_of, truncated
from baton.gateway.fields.validation import check_context
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.openai.chat_request import CheckedChat, checked_chat, encoded_chat, mask_for
from baton.gateway.openai.completions import CheckedCompletion, checked_completion, encode_all
from baton.gateway.openai.rendering.types import RenderChatRequest
from baton.gateway.openai.token_generate import TokenSampling
from baton.gateway.schemas.requests import CompletionRequest, GenerationFields
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.request_lists import check_shared_lists
from baton.rpc.errors import InvalidRequest

# Members of the request itself, not of its sampling_params.
_OWN = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id")
# Already applied to the token ids, or members of the answer's text.
_APPLIED = ("truncate_prompt_tokens", "truncation_side", "return_token_ids")
_SAMPLING = tuple(name for name in TokenSampling.__struct_fields__ if name not in (*_OWN, *_APPLIED, "max_tokens"))


class RenderChat:
    """Handles POST /v1/chat/completions/render."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(RenderChatRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        checked, mask = await serving.bodies.run(
            partial(self._check, exchange), exchange.num_body_bytes, exchange.owner
        )
        request, model = checked.request, checked.model
        max_model_len = model.require_info().max_model_len
        token_ids = truncated(await encoded_chat(checked, mask), request, max_model_len)
        check_context(len(token_ids), max_model_len, "messages")
        _check_form(checked, token_ids)
        most = request.max_completion_tokens or request.max_tokens or serving.config.default_max_tokens
        sampling = {"max_tokens": most, "logprobs": chat_num_logprobs(request)}
        rendered = _rendered(request, exchange.request_id, model.name, token_ids, sampling)
        if mask is not None:
            rendered["assistant_tokens_mask"] = truncated(mask, request, max_model_len)
        exchange.respond(200, msgspec.json.encode(rendered))

    def _check(self, exchange: Exchange) -> tuple[CheckedChat, list[int] | None]:
        """Returns the chat, and the list for its assistant's tokens, if they are asked for."""
        request = self._decoder.read(exchange)
        return checked_chat(self._serving, exchange, request), mask_for(request)


class RenderCompletion:
    """Handles POST /v1/completions/render: one request for each prompt."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(CompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        checked = await serving.bodies.run(partial(self._check, exchange), exchange.num_body_bytes, exchange.owner)
        request, model = checked.request, checked.model
        for name in ("echo", "best_of"):
            if getattr(request, name):
                raise InvalidRequest(f"{name} is not allowed here: token ids alone do not carry it", field=name)
        _check_lists(request, checked.requested, len(checked.sources))
        prompts = await encode_all(model, request, checked.sources, 1)
        most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        sampling = {"max_tokens": most, "logprobs": request.logprobs}
        name = exchange.request_id
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        rendered = []
        for one, prompt in zip(names, prompts, strict=True):
            await asyncio.sleep(0)
            rendered.append(_rendered(request, one, model.name, prompt.token_ids, sampling))
        exchange.respond(200, msgspec.json.encode(rendered))

    def _check(self, exchange: Exchange) -> CheckedCompletion:
        return checked_completion(self._serving, exchange, self._decoder.read(exchange))


def _check_lists(request: CompletionRequest, requested: RequestedConstraint | None, count: int) -> None:
    """Raises InvalidRequest for lists that are too long to be repeated for each prompt."""
    constraint, field = (None, "") if requested is None else (requested.constraint, requested.field)
    check_shared_lists(sampling_of(request, None), stop_of(request, None), constraint, field, count)


def _rendered(
    request: GenerationFields, request_id: str, model: str, token_ids: list[int], sampling: dict[str, Any]
) -> dict[str, Any]:
    """Returns a body of /inference/v1/generate without what is unset."""
    given = {name: getattr(request, name, None) for name in _SAMPLING}
    own = {name: getattr(request, name) for name in _OWN}
    own["request_id"] = own["request_id"] or request_id
    fields = {**own, "model": model, "token_ids": token_ids, "sampling_params": _set({**given, **sampling})}
    built: dict[str, Any] = msgspec.to_builtins(_set(fields), str_keys=True)
    return built


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _check_form(checked: CheckedChat, token_ids: list[int]) -> None:
    """Raises InvalidRequest for an output whose form token ids alone do not carry."""
    model, use, requested = checked.model, checked.use, checked.requested
    parsing = model.output_parsing(use, token_ids, checked.request.include_reasoning is not False)
    if parsing is None:
        return
    if requested is None:
        carried, field = parsing.constraint is None, "tool_choice" if checked.request.tools else "function_call"
    else:
        field = requested.field
        carried = model.constraint(requested.constraint, field, use, token_ids) == requested.constraint
    if not carried:
        raise InvalidRequest(
            f"{field} is not allowed here: /inference/v1/generate cannot hold the output to it after reasoning or in "
            "tool calls",
            field=field,
        )
