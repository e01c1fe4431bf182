"""The routes that make answers of generated token ids, without a worker."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import replace as replaced
from functools import partial

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.core import Delta, GenerationRequest
from baton.gateway.fields.sampling import stop_of, truncated
from baton.gateway.generation.generator import output_of
from baton.gateway.generation.output.choice import Choice
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.chat import DOCUMENTS
from baton.gateway.openai.chat_answer import ChatShape
from baton.gateway.openai.chat_request import CheckedChat, checked_chat, encoded_chat
from baton.gateway.openai.completions import checked_completion
from baton.gateway.openai.rendering.types import DerenderChatRequest, DerenderCompletionRequest
from baton.gateway.openai.token_generate import TokenChoice, TokenGeneration
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import GenerationFields
from baton.gateway.serving.answer import usage_of
from baton.gateway.serving.chat import fields_named
from baton.gateway.serving.context import ServingContext, fingerprint
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_TOKEN_ID = re.compile(r"token_id:(\d{1,10})")


class DerenderChat:
    """Handles POST /v1/chat/completions/derender."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(DerenderChatRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        request, model, checked = await serving.bodies.run(
            partial(self._check, exchange), exchange.num_body_bytes, exchange.owner
        )
        response = request.generate_response
        prompt = [] if checked is None else await _prompt_of(checked)
        parsing = None
        if checked is not None:
            includes_reasoning = checked.request.include_reasoning is not False
            parsing = model.output_parsing(checked.use, prompt, includes_reasoning)
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
            await asyncio.sleep(0)
            for delta in _deltas(index, choice, model, fields, prompt, parsing):
                document.collect(index, delta)
        num_output = sum(len(choice.token_ids) for choice in response.choices)
        answer = document.document(usage_of(num_prompt_tokens, num_output, 0))
        for made, choice in zip(answer.choices, response.choices, strict=True):
            made.logprobs = _with_names(choice.logprobs, model)
        answer.prompt_logprobs = response.prompt_logprobs or UNSET
        exchange.respond(200, msgspec.json.encode(answer))

    def _check(self, exchange: Exchange) -> tuple[DerenderChatRequest, ServedModel, CheckedChat | None]:
        request = self._decoder.read(exchange)
        _check_stream(request.stream)
        model = self._serving.model(exchange, request.model)
        _check_response(request.generate_response, model, "generate_response", self._serving.config.max_choices)
        chat = request.chat_request
        if chat is None:
            return request, model, None
        chat = replace(chat, model=request.model)
        with fields_named({name: f"chat_request.{name}" for name in chat.__struct_fields__}):
            return request, model, checked_chat(self._serving, exchange, chat)


class DerenderCompletion:
    """Handles POST /v1/completions/derender."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(DerenderCompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        request, model = await serving.bodies.run(
            partial(self._check, exchange), exchange.num_body_bytes, exchange.owner
        )
        fields = request.completion_request or GenerationFields()
        choices: list[answers.CompletionChoice] = []
        for response in request.generate_responses:
            for choice in response.choices:
                await asyncio.sleep(0)
                choices.append(_completion_choice(len(choices), choice, response, model, fields))
        num_output = sum(len(one.token_ids) for response in request.generate_responses for one in response.choices)
        answer = answers.Completion(
            id=request.generate_responses[0].request_id,
            created=int(time.time()),
            model=model.name,
            system_fingerprint=fingerprint(model),
            choices=choices,
            usage=usage_of(sum(request.prompt_tokens or ()), num_output, 0),
        )
        exchange.respond(200, msgspec.json.encode(answer))

    def _check(self, exchange: Exchange) -> tuple[DerenderCompletionRequest, ServedModel]:
        serving, request = self._serving, self._decoder.read(exchange)
        _check_stream(request.stream)
        model = serving.model(exchange, request.model)
        responses, counts = request.generate_responses, request.prompt_tokens
        most = serving.config.max_prompts
        if len(responses) > most:
            message = f"generate_responses has {len(responses)} responses; at most {most} are allowed"
            raise InvalidRequest(message, field="generate_responses")
        for index, response in enumerate(responses):
            _check_response(response, model, f"generate_responses.{index}", serving.config.max_choices)
        if counts is not None and len(counts) != len(responses):
            message = f"prompt_tokens has {len(counts)} counts; give one for each of the {len(responses)} responses"
            raise InvalidRequest(message, field="prompt_tokens")
        if request.completion_request is not None:
            completion = request.completion_request = replace(request.completion_request, model=request.model)
            with fields_named({name: f"completion_request.{name}" for name in completion.__struct_fields__}):
                checked_completion(serving, exchange, completion)
        return request, model


def _check_stream(stream: bool | None) -> None:
    if stream:
        raise InvalidRequest("stream is not supported here; give the whole response", field="stream")


def _check_response(response: TokenGeneration, model: ServedModel, where: str, max_choices: int) -> None:
    if not 1 <= len(response.choices) <= max_choices:
        message = f"{where}.choices has {len(response.choices)} choices; give 1 to {max_choices}"
        raise InvalidRequest(message, field=f"{where}.choices")
    most = model.require_info().max_model_len
    for index, choice in enumerate(response.choices):
        field = f"{where}.choices.{index}.token_ids"
        if len(choice.token_ids) > most:
            message = f"{field} has {len(choice.token_ids)} tokens; the model's context has {most}"
            raise InvalidRequest(message, field=field)
        if min(choice.token_ids, default=0) < 0:
            raise InvalidRequest(f"{field} has a negative token id", field=field)
        model.check_token_ids(choice.token_ids, field)


async def _prompt_of(checked: CheckedChat) -> list[int]:
    return truncated(await encoded_chat(checked), checked.request, checked.model.require_info().max_model_len)


def _deltas(
    index: int,
    choice: TokenChoice,
    model: ServedModel,
    fields: GenerationFields,
    prompt: Sequence[int],
    parsing: OutputParsing | None,
) -> list[Delta]:
    """Returns the choice's output as a generation gives it."""
    output = _output(index, model, fields, prompt, parsing)
    deltas = [output.take(choice.token_ids, None)] if choice.token_ids else []
    if not output.finished:
        stop_token = choice.stop_reason if isinstance(choice.stop_reason, int) else None
        deltas.append(output.end(choice.finish_reason or "stop", stop_token))
    return deltas


def _output(
    index: int, model: ServedModel, fields: GenerationFields, prompt: Sequence[int], parsing: OutputParsing | None
) -> Choice:
    request = GenerationRequest(
        request_id="",
        model=model.name,
        prompt_token_ids=list(prompt),
        stop=stop_of(fields, None),
        skip_special_tokens=fields.skip_special_tokens is not False,
        output_parsing=parsing,
    )
    stop_ids = frozenset(() if fields.ignore_eos else model.require_info().eos_token_ids)
    stop_ids = stop_ids.union(fields.stop_token_ids or ())
    return output_of(index, request, stop_ids, types_pb2.SamplingParams(), model)


def _completion_choice(
    index: int, choice: TokenChoice, response: TokenGeneration, model: ServedModel, fields: GenerationFields
) -> answers.CompletionChoice:
    deltas = _deltas(index, choice, model, fields, (), None)
    named = _with_names(choice.logprobs, model)
    is_first = choice is response.choices[0]
    return answers.CompletionChoice(
        index=index,
        text="".join(delta.text for delta in deltas),
        logprobs=None if named is None else _columns(named),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        token_ids=choice.token_ids if fields.return_token_ids else UNSET,
        prompt_logprobs=(response.prompt_logprobs or UNSET) if is_first else UNSET,
    )


def _columns(logprobs: answers.ChatLogprobs) -> answers.CompletionLogprobs:
    """Returns a completion's form of a chat's log-probabilities."""
    columns = answers.CompletionLogprobs([], [], [], [])
    offset = 0
    for entry in logprobs.content:
        columns.text_offset.append(offset)
        columns.token_logprobs.append(entry.logprob)
        columns.tokens.append(entry.token)
        top = {one.token: one.logprob for one in entry.top_logprobs}
        columns.top_logprobs.append({**top, entry.token: entry.logprob})
        offset += len(entry.token)
    return columns


def _with_names(logprobs: answers.ChatLogprobs | None, model: ServedModel) -> answers.ChatLogprobs | None:
    """Returns the log-probabilities with the tokens' texts instead of "token_id:N"."""
    if logprobs is None:
        return None
    entries = []
    for entry in logprobs.content:
        top = [replace(one, **_name(one.token, model)) for one in entry.top_logprobs]
        entries.append(replace(entry, **_name(entry.token, model), top_logprobs=top))
    return answers.ChatLogprobs(content=entries)


def _name(token: str, model: ServedModel) -> dict[str, str | list[int]]:
    found = _TOKEN_ID.fullmatch(token)
    if found is None:
        return {}
    data = model.tokenizer.token_bytes(int(found[1]))
    return {"token": data.decode(errors="replace"), "bytes": list(data)}
