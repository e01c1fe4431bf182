"""Outputs of generated token ids: texts, reasoning and calls, names of tokens. Knows no route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from msgspec.structs import replace

from baton.gateway.core import Delta, GenerationRequest
from baton.gateway.fields.sampling import stop_of, truncated
from baton.gateway.generation.generator import output_of
from baton.gateway.generation.output.choice import Choice
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.chat_request import CheckedChat, encoded_chat
from baton.gateway.openai.token_generate import TokenChoice
from baton.gateway.parsing.output_format import OutputParsing
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import GenerationFields
from baton.rpc.errors import InvalidRequest
from baton.v1 import types_pb2

_TOKEN_ID = re.compile(r"token_id:(\d{1,10})")
_TOKENS_AT_ONCE = 512  # other requests run between two pieces of an output


def check_token_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Raises InvalidRequest for token ids that the model cannot have generated."""
    most = model.require_info().max_model_len
    if len(token_ids) > most:
        message = f"{field} has {len(token_ids)} tokens; the model's context has {most}"
        raise InvalidRequest(message, field=field)
    if min(token_ids, default=0) < 0:
        raise InvalidRequest(f"{field} has a negative token id", field=field)
    model.check_token_ids(token_ids, field)


async def prompt_of(checked: CheckedChat | None, given: Sequence[int] | None) -> list[int]:
    """Returns the prompt's token ids: those given, or those of the chat. Raises InvalidRequest, ContextTooLong."""
    if given is not None:
        return list(given)
    if checked is None:
        return []
    return truncated(await encoded_chat(checked), checked.request, checked.model.require_info().max_model_len)


def parsing_of(checked: CheckedChat | None, prompt: Sequence[int]) -> OutputParsing | None:
    """Returns how reasoning and calls are parsed; None: all text is the answer."""
    if checked is None:
        return None
    return checked.model.output_parsing(checked.use, prompt, checked.request.include_reasoning is not False)


async def take_all(output: Choice, token_ids: Sequence[int]) -> list[Delta]:
    """Returns the deltas of an output's next tokens, until it has ended."""
    deltas = []
    for begin in range(0, len(token_ids), _TOKENS_AT_ONCE):
        if output.finished:
            break
        deltas.append(output.take(token_ids[begin : begin + _TOKENS_AT_ONCE], None))
        await asyncio.sleep(0)
    return deltas


def end_of(output: Choice, choice: TokenChoice) -> Delta:
    """Returns the last delta of an output that the worker ended."""
    stop_token = choice.stop_reason if isinstance(choice.stop_reason, int) else None
    return output.end(choice.finish_reason or "stop", stop_token)


def new_output(
    index: int, model: ServedModel, fields: GenerationFields, prompt: Sequence[int], parsing: OutputParsing | None
) -> Choice:
    """Returns an output before its first token."""
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


def columns_of(logprobs: answers.ChatLogprobs) -> answers.CompletionLogprobs:
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


def with_names(logprobs: answers.ChatLogprobs | None, model: ServedModel) -> answers.ChatLogprobs | None:
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
