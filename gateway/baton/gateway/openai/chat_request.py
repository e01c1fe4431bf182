"""Checks chats of every route that takes them, and encodes their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.gateway.fields.adopted import adopt, requested_constraint
from baton.gateway.fields.chat import check_chat, check_chat_size, template_messages, template_variables
from baton.gateway.fields.neutral import drop_neutral, drop_neutral_choices
from baton.gateway.fields.tools import fields_of, tool_use_of
from baton.gateway.fields.unserved_tools import skip_tools
from baton.gateway.fields.validation import check_for_model, check_template, expand_logprobs
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.constraints.structured_output import RequestedConstraint
from baton.gateway.models.served import ServedModel
from baton.gateway.models.tasks import check_generates
from baton.gateway.parsing.tool import ToolUse
from baton.gateway.schemas.requests import ChatCompletionRequest
from baton.gateway.serving.context import ServingContext
from baton.rpc.errors import ServiceError

# Maps the generator's field names to those of chats.
_FIELDS = {"prompt": "messages", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True)
class CheckedChat:
    """A validated request."""

    request: ChatCompletionRequest
    use: ToolUse
    requested: RequestedConstraint | None
    model: ServedModel
    messages: list[dict[str, Any]]  # in the form that the template expects


def checked_chat(serving: ServingContext, exchange: Exchange, request: ChatCompletionRequest) -> CheckedChat:
    """Returns the validated request; runs on another thread if it is large. Raises ServiceError."""
    config = serving.config
    exchange.ignore([*adopt(request), *skip_tools(request)])
    drop_neutral(request)
    drop_neutral_choices(request)
    check_chat(request, config.max_choices, config.most_logprobs)
    check_template(request.chat_template, config.trust_request_chat_template)
    use = tool_use_of(request)
    requested = requested_constraint(request, use)
    model = serving.model(exchange, request.model)
    info = model.require_info()
    check_generates(model.name, info)
    check_for_model(request, info)
    expand_logprobs(request, info.vocab_size)
    check_chat_size(request.messages, info.max_model_len, len(use.tools))
    with fields_of(request):
        model.check_tools(use)
    return CheckedChat(request, use, requested, model, template_messages(request.messages))


def mask_for(request: ChatCompletionRequest) -> list[int] | None:
    """Returns the list that takes the mask of the assistant's tokens, or None if it is not requested."""
    return [] if request.return_assistant_tokens_mask else None


async def encoded_chat(checked: CheckedChat, mask: list[int] | None = None) -> list[int]:
    """Returns the prompt's token ids, before truncation. `mask` gets 1 for each token of the assistant, otherwise 0.

    Raises InvalidRequest, ContextTooLong.
    """
    request, use = checked.request, checked.use
    continues_last = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt
    try:
        return await checked.model.encode_chat(
            checked.messages,
            add_generation_prompt=not continues_last if add_prompt is None else add_prompt,
            continue_final_message=continues_last,
            # Without tools in the prompt, a model calls none.
            tools=[tool.for_template() for tool in use.tools] if use.active else None,
            documents=request.documents,
            variables=template_variables(request),
            add_special_tokens=bool(request.add_special_tokens),
            template=request.chat_template,
            whole=request.truncate_prompt_tokens is not None,
            mask=mask,
        )
    except ServiceError as error:
        error.field = _FIELDS.get(error.field, error.field)
        raise
