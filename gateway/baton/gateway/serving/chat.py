"""One turn of a chat for every API: from messages to a generation, and from its output to events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.core import Delta, GenerationRequest
from baton.gateway.fields.adopted import requested_constraint
from baton.gateway.fields.chat import check_item_count
from baton.gateway.fields.sampling import sampling_of, stop_of
from baton.gateway.fields.validation import check_context, check_fields, check_for_model
from baton.gateway.models.constraints.structured_output import RequestedConstraint, unless_tools_called
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import check_generates
from baton.gateway.parsing.events import ContentText, Event
from baton.gateway.parsing.tool import ToolUse
from baton.gateway.schemas.requests import GenerationFields
from baton.gateway.serving.context import Call, ServingContext
from baton.gateway.serving.reasoning_limit import can_limit, limit_reasoning
from baton.rpc.errors import ServiceError


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A chat that asks for one output."""

    messages: Sequence[Mapping[str, Any]]  # in the form that templates expect
    fields: GenerationFields
    max_tokens: int | None  # None: up to the context's length
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    tools: ToolUse = field(default_factory=ToolUse)
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    continues_last: bool = False  # whether the output continues the last message
    include_reasoning: bool = True
    reasoning_budget: int | None = None  # tokens; None: no limit
    requested: RequestedConstraint | None = None  # replaces the constraint of `fields`
    session: str = ""  # the client's name of its session; empty: the field `user`
    must_limit_reasoning: bool = False  # False: ignore the budget if the gateway cannot end the model's reasoning


def events_of(delta: Delta) -> list[Event]:
    """Returns a delta's events, or its text as one event if it was not parsed."""
    if delta.events is not None:
        return delta.events
    return [ContentText(delta.text)] if delta.text else []


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors use this API's field names."""
    try:
        yield
    except ServiceError as error:
        rename_field(error, names)
        raise


def rename_field(error: ServiceError, names: Mapping[str, str]) -> None:
    """Renames the error's field. The longest matching name is used."""
    field = error.field
    for name in sorted(names, key=len, reverse=True):
        if field == name or field.startswith(f"{name}."):
            error.field = names[name] + field.removeprefix(name)
            error.message = error.message.replace(field, error.field)
            return


def check_turn(model: ServedModel, turn: ChatTurn) -> None:
    """Raises InvalidRequest, ContextTooLong or Unavailable for a turn that cannot be served. May run on any thread."""
    info = model.require_info()
    check_generates(model.name, info)
    check_fields(turn.fields, 1)
    check_for_model(turn.fields, info)
    check_item_count(len(turn.messages) + len(turn.tools.tools), info.max_model_len)
    model.check_tools(turn.tools)


async def encode_turn(model: ServedModel, turn: ChatTurn) -> list[int]:
    """Returns the token ids of a checked turn. Raises InvalidRequest, ContextTooLong, Unavailable."""
    max_model_len = model.require_info().max_model_len
    token_ids = await model.encode_chat(
        turn.messages,
        add_generation_prompt=not turn.continues_last,
        continue_final_message=turn.continues_last,
        tools=[tool.for_template() for tool in turn.tools.tools] if turn.tools.active else None,
        variables=turn.variables,
    )
    check_context(len(token_ids), max_model_len, "messages")
    return token_ids


def generation_of(
    serving: ServingContext, call: Call, request_id: str, model: ServedModel, turn: ChatTurn, token_ids: list[int]
) -> GenerationRequest:
    """Returns the turn's request to the generator."""
    sampling = sampling_of(turn.fields, turn.logprobs)
    if turn.must_limit_reasoning or can_limit(model):
        limit_reasoning(sampling, model, token_ids, turn.reasoning_budget)
    stop = stop_of(turn.fields, turn.max_tokens)
    output_parsing = model.output_parsing(turn.tools, token_ids, turn.include_reasoning)
    requested = (
        requested_constraint(turn.fields, turn.tools)
        if turn.requested is None
        else unless_tools_called(turn.requested, turn.tools)
    )
    form = (output_parsing, requested, turn.tools)
    return serving.generation_request(
        call,
        request_id,
        model,
        turn.fields,
        token_ids,
        sampling,
        stop,
        *form,
        holds_logprobs=True,
        session=turn.session,
    )
