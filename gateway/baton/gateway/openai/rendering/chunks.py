"""Streamed answers of generated token ids: one event in, one chunk out. The client keeps what lies between.

The state has all tokens of the output so far, which are parsed again for each chunk: no gateway remembers a stream.
"""

from __future__ import annotations

import time

from msgspec import UNSET
from msgspec.structs import replace

from baton.gateway.core import Delta
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.chat_request import CheckedChat
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
from baton.gateway.openai.rendering.types import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    DerenderState,
)
from baton.gateway.openai.token_generate import TokenChoice, TokenGeneration
from baton.gateway.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import GenerationFields
from baton.gateway.serving.answer import usage_of
from baton.gateway.serving.context import fingerprint
from baton.rpc.errors import InvalidRequest


def check_chunk(chunk: TokenGeneration | None, state: DerenderState | None, model: ServedModel) -> None:
    """Raises InvalidRequest for an event, or a state, that no stream has."""
    if chunk is None:
        raise InvalidRequest("generate_chunk is required with stream", field="generate_chunk")
    if len(chunk.choices) > 1:
        field = "generate_chunk.choices"
        message = f"{field} has {len(chunk.choices)} choices; give one, with the state of its stream"
        raise InvalidRequest(message, field=field)
    tokens = state.output_token_ids if state is not None else []
    check_token_ids(tokens, model, "stream_state.output_token_ids")
    for choice in chunk.choices:
        field = "generate_chunk.choices.0.token_ids"
        check_token_ids(choice.token_ids, model, field)
        most = model.require_info().max_model_len
        if len(tokens) + len(choice.token_ids) > most:
            message = f"{field}: the output has more than the {most} tokens of the model's context"
            raise InvalidRequest(message, field=field)


async def chat_chunk(
    request: DerenderChatRequest, model: ServedModel, checked: CheckedChat | None
) -> DerenderedChatChunk:
    """Returns the chunk of an event, and the state for the next one."""
    chunk, state = _parts(request)
    fields = checked.request if checked is not None else GenerationFields()
    choices = []
    for choice in chunk.choices:
        prompt = await prompt_of(checked, request.prompt_token_ids)
        parsing = parsing_of(checked, prompt)
        deltas = await _new_deltas(choice, state, model, fields, prompt, parsing)
        as_function = checked is not None and bool(checked.request.functions)
        made = _chat_choice(choice, deltas, state, as_function, parsing is not None)
        made.logprobs = with_names(choice.logprobs, model)
        made.token_ids = choice.token_ids if fields.return_token_ids else UNSET
        choices.append(made)
    made_chunk = answers.ChatCompletionChunk(
        id=chunk.request_id,
        created=state.created,
        model=model.name,
        system_fingerprint=fingerprint(model),
        choices=choices,
        usage=_usage(chunk, request.prompt_tokens),
    )
    return DerenderedChatChunk(chunk=made_chunk, stream_state=state)


async def completion_chunk(request: DerenderCompletionRequest, model: ServedModel) -> DerenderedCompletionChunk:
    """Returns the chunk of an event, and the state for the next one."""
    chunk, state = _parts(request)
    fields = request.completion_request or GenerationFields()
    choices = []
    for choice in chunk.choices:
        deltas = await _new_deltas(choice, state, model, fields, [], None)
        named = with_names(choice.logprobs, model)
        reason, stop_reason = _ending(deltas)
        choices.append(
            answers.CompletionChoice(
                index=choice.index,
                text="".join(delta.text for delta in deltas),
                logprobs=None if named is None else columns_of(named),
                finish_reason=reason,
                stop_reason=stop_reason,
                token_ids=choice.token_ids if fields.return_token_ids else UNSET,
            )
        )
    counts = request.prompt_tokens
    made_chunk = answers.Completion(
        id=chunk.request_id,
        created=state.created,
        model=model.name,
        system_fingerprint=fingerprint(model),
        choices=choices,
        usage=_usage(chunk, counts if isinstance(counts, int) else None),
    )
    return DerenderedCompletionChunk(chunk=made_chunk, stream_state=state)


def _parts(request: DerenderChatRequest | DerenderCompletionRequest) -> tuple[TokenGeneration, DerenderState]:
    assert request.generate_chunk is not None, "it was checked"
    state = request.stream_state or DerenderState(created=int(time.time()))
    return request.generate_chunk, state


async def _new_deltas(
    choice: TokenChoice,
    state: DerenderState,
    model: ServedModel,
    fields: GenerationFields,
    prompt: list[int],
    parsing: OutputParsing | None,
) -> list[Delta]:
    """Returns the event's deltas, after the tokens of the state, and adds its tokens there."""
    output = new_output(choice.index, model, fields, prompt, parsing)
    await take_all(output, state.output_token_ids)
    deltas = await take_all(output, choice.token_ids)
    if choice.finish_reason is not None and not output.finished:
        deltas.append(end_of(output, choice))
    state.output_token_ids = [*state.output_token_ids, *choice.token_ids]
    return deltas


def _chat_choice(
    choice: TokenChoice, deltas: list[Delta], state: DerenderState, as_function: bool, is_parsed: bool
) -> answers.ChatChunkChoice:
    made = answers.ChatDelta()
    if not state.role_sent:
        state.role_sent = True
        made.role, made.content = "assistant", ""
    for delta in deltas:
        events = delta.events or () if is_parsed else (ContentText(delta.text),) if delta.text else ()
        for event in events:
            _add(made, event, as_function)
    reason, stop_reason = _ending(deltas)
    if reason == "tool_calls" and as_function:
        reason = "function_call"
    return answers.ChatChunkChoice(
        index=choice.index, delta=made, logprobs=None, finish_reason=reason, stop_reason=stop_reason
    )


def _ending(deltas: list[Delta]) -> tuple[str | None, str | int | None]:
    return (deltas[-1].finish_reason, deltas[-1].stop_reason) if deltas else (None, None)


def _add(made: answers.ChatDelta, event: Event, as_function: bool) -> None:
    """Adds an event to a chunk's delta."""
    match event:
        case ContentText(text):
            made.content = (made.content or "") + text
        case ReasoningText(text):
            made.reasoning = made.reasoning_content = (made.reasoning or "") + text
        case CallStart(index, call_id, name):
            if not as_function:
                begun = answers.ToolCallDelta(index, call_id, "function", answers.FunctionDelta())
                made.tool_calls = [*(made.tool_calls or ()), begun]
            _function(made, index, as_function).name = name
        case CallArguments(index, fragment):
            function = _function(made, index, as_function)
            function.arguments = (function.arguments or "") + fragment


def _function(made: answers.ChatDelta, index: int, as_function: bool) -> answers.FunctionDelta:
    """Returns the part of a call in a delta, which is added if it is not there."""
    if as_function:
        made.function_call = made.function_call or answers.FunctionDelta()
        return made.function_call
    calls = made.tool_calls = made.tool_calls or []
    if not calls or calls[-1].index != index:
        calls.append(answers.ToolCallDelta(index, function=answers.FunctionDelta()))
    function = calls[-1].function
    assert function is not None
    return function


def _usage(chunk: TokenGeneration, prompt_tokens: int | None) -> answers.Usage | None:
    usage = chunk.usage
    if usage is None or prompt_tokens is None:
        return usage
    return replace(
        usage_of(prompt_tokens, usage.completion_tokens, 0), prompt_tokens_details=usage.prompt_tokens_details
    )
