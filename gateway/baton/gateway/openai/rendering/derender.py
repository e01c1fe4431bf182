"""The routes that make answers of generated token ids, without a worker."""

from __future__ import annotations

import time
from dataclasses import replace as replaced
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.chat import DOCUMENTS
from baton.gateway.openai.chat_answer import ChatShape
from baton.gateway.openai.chat_request import CheckedChat, checked_chat
from baton.gateway.openai.completions import checked_completion
from baton.gateway.openai.rendering.chunks import chat_chunk, check_chunk, completion_chunk
from baton.gateway.openai.rendering.outputs import (
    check_token_ids,
    columns_of,
    end_of,
    new_output,
    parsing_of,
    prompt_of,
    take_all,
    with_names,
)
from baton.gateway.openai.rendering.types import DerenderChatRequest, DerenderCompletionRequest
from baton.gateway.openai.token_generate import TokenChoice, TokenGeneration
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import GenerationFields
from baton.gateway.serving.answer import usage_of
from baton.gateway.serving.chat import fields_named
from baton.gateway.serving.context import ServingContext, fingerprint
from baton.rpc.errors import InvalidRequest

T = TypeVar("T")


class DerenderChat:
    """Handles POST /v1/chat/completions/derender."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(DerenderChatRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        request, model, checked = await self._serving.bodies.run(
            partial(self._check, exchange), exchange.num_body_bytes, exchange.owner
        )
        if request.stream:
            exchange.respond(200, msgspec.json.encode(await chat_chunk(request, model, checked)))
            return
        answer = await self._answer(exchange, request, model, checked)
        exchange.respond(200, msgspec.json.encode(answer))

    async def _answer(
        self, exchange: Exchange, request: DerenderChatRequest, model: ServedModel, checked: CheckedChat | None
    ) -> answers.ChatCompletion:
        serving, response = self._serving, _given(request.generate_response, "generate_response")
        prompt = await prompt_of(checked, request.prompt_token_ids)
        parsing = parsing_of(checked, prompt)
        num_prompt_tokens = len(prompt) if request.prompt_tokens is None else request.prompt_tokens
        shape = ChatShape(
            num_choices=len(response.choices),
            num_prompt_tokens=num_prompt_tokens,
            prompt_token_ids=[] if checked is not None and checked.request.return_token_ids else None,
            function_call=checked is not None and bool(checked.request.functions),
        )
        fields = checked.request if checked is not None else GenerationFields()
        envelope = replaced(
            serving.envelope("chat.completion", "chatcmpl", exchange, model, fields),
            id=response.request_id,
            with_metrics=False,
        )
        document = DOCUMENTS[parsing is not None](exchange, serving.meter(exchange, shape.num_choices), envelope, shape)
        for index, choice in enumerate(response.choices):
            output = new_output(index, model, fields, prompt, parsing)
            for delta in await take_all(output, choice.token_ids):
                document.collect(index, delta)
            if not output.finished:
                document.collect(index, end_of(output, choice))
        num_output = sum(len(choice.token_ids) for choice in response.choices)
        answer = document.document(usage_of(num_prompt_tokens, num_output, 0))
        for made, choice in zip(answer.choices, response.choices, strict=True):
            made.logprobs = with_names(choice.logprobs, model)
        answer.prompt_logprobs = response.prompt_logprobs or UNSET
        return answer

    def _check(self, exchange: Exchange) -> tuple[DerenderChatRequest, ServedModel, CheckedChat | None]:
        request = self._decoder.read(exchange)
        model = self._serving.model(exchange, request.model)
        if request.stream:
            check_chunk(request.generate_chunk, request.stream_state, model)
        else:
            response = _given(request.generate_response, "generate_response")
            _check_response(response, model, "generate_response", self._serving.config.max_choices)
        check_token_ids(request.prompt_token_ids or (), model, "prompt_token_ids")
        chat = request.chat_request
        if chat is None:
            return request, model, None
        chat = replace(chat, model=request.model, return_assistant_tokens_mask=None)
        with fields_named({name: f"chat_request.{name}" for name in chat.__struct_fields__}):
            return request, model, checked_chat(self._serving, exchange, chat)


class DerenderCompletion:
    """Handles POST /v1/completions/derender."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(DerenderCompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        request, model = await self._serving.bodies.run(
            partial(self._check, exchange), exchange.num_body_bytes, exchange.owner
        )
        if request.stream:
            exchange.respond(200, msgspec.json.encode(await completion_chunk(request, model)))
            return
        exchange.respond(200, msgspec.json.encode(await _completion(request, model)))

    def _check(self, exchange: Exchange) -> tuple[DerenderCompletionRequest, ServedModel]:
        serving, request = self._serving, self._decoder.read(exchange)
        model = serving.model(exchange, request.model)
        if request.stream:
            check_chunk(request.generate_chunk, request.stream_state, model)
            if isinstance(request.prompt_tokens, list):
                raise InvalidRequest("prompt_tokens must be one number with stream", field="prompt_tokens")
        else:
            self._check_responses(request, model)
        if request.completion_request is not None:
            completion = request.completion_request = replace(request.completion_request, model=request.model)
            with fields_named({name: f"completion_request.{name}" for name in completion.__struct_fields__}):
                checked_completion(serving, exchange, completion)
        return request, model

    def _check_responses(self, request: DerenderCompletionRequest, model: ServedModel) -> None:
        responses, counts = _given(request.generate_responses, "generate_responses"), request.prompt_tokens
        config = self._serving.config
        if len(responses) > config.max_prompts:
            message = f"generate_responses has {len(responses)} responses; at most {config.max_prompts} are allowed"
            raise InvalidRequest(message, field="generate_responses")
        for index, response in enumerate(responses):
            _check_response(response, model, f"generate_responses.{index}", config.max_choices)
        if counts is not None and (isinstance(counts, int) or len(counts) != len(responses)):
            given = 1 if isinstance(counts, int) else len(counts)
            message = (
                f"prompt_tokens has {given} counts; give a list with one for each of the {len(responses)} responses"
            )
            raise InvalidRequest(message, field="prompt_tokens")


async def _completion(request: DerenderCompletionRequest, model: ServedModel) -> answers.Completion:
    fields = request.completion_request or GenerationFields()
    responses, counts = request.generate_responses or [], request.prompt_tokens
    choices: list[answers.CompletionChoice] = []
    for response in responses:
        for choice in response.choices:
            choices.append(await _completion_choice(len(choices), choice, response, model, fields))
    num_output = sum(len(one.token_ids) for response in responses for one in response.choices)
    num_prompt = sum(counts) if isinstance(counts, list) else 0
    return answers.Completion(
        id=responses[0].request_id,
        created=int(time.time()),
        model=model.name,
        system_fingerprint=fingerprint(model),
        choices=choices,
        usage=usage_of(num_prompt, num_output, 0),
    )


async def _completion_choice(
    index: int, choice: TokenChoice, response: TokenGeneration, model: ServedModel, fields: GenerationFields
) -> answers.CompletionChoice:
    output = new_output(index, model, fields, (), None)
    deltas = await take_all(output, choice.token_ids)
    if not output.finished:
        deltas.append(end_of(output, choice))
    named = with_names(choice.logprobs, model)
    is_first = choice is response.choices[0]
    return answers.CompletionChoice(
        index=index,
        text="".join(delta.text for delta in deltas),
        logprobs=None if named is None else columns_of(named),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        token_ids=choice.token_ids if fields.return_token_ids else UNSET,
        prompt_logprobs=(response.prompt_logprobs or UNSET) if is_first else UNSET,
    )


def _given(value: T | None, field: str) -> T:
    if value is None:
        raise InvalidRequest(f"{field} is required", field=field)
    return value


def _check_response(response: TokenGeneration, model: ServedModel, where: str, max_choices: int) -> None:
    if not 1 <= len(response.choices) <= max_choices:
        message = f"{where}.choices has {len(response.choices)} choices; give 1 to {max_choices}"
        raise InvalidRequest(message, field=f"{where}.choices")
    for index, choice in enumerate(response.choices):
        check_token_ids(choice.token_ids, model, f"{where}.choices.{index}.token_ids")
