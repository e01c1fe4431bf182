"""POST /v1/chat/completions/batch: several conversations in one request, one choice for each. Never streamed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from msgspec import Meta

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.thread import INLINE_BYTES
from baton.gateway.core import GenerationRequest
from baton.gateway.fields.chat import chat_num_logprobs
from baton.gateway.fields.sampling import sampling_of, stop_of, truncated
from baton.gateway.fields.validation import check_context
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.prompts.rendering import size_of
from baton.gateway.openai.chat import DOCUMENTS
from baton.gateway.openai.chat_answer import ChatShape
from baton.gateway.openai.chat_request import CheckedChat, checked_chat, encoded_chat
from baton.gateway.openai.logprobs import form_of
from baton.gateway.rest.routing import Route
from baton.gateway.schemas import answers
from baton.gateway.schemas.requests import ChatCompletionRequest, ChatMessage
from baton.gateway.serving.affinity import PLACING
from baton.gateway.serving.answer_size import limit_logprobs
from baton.gateway.serving.chat import fields_named
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.reasoning_limit import limit_reasoning
from baton.gateway.serving.request_lists import check_shared_lists
from baton.rpc.errors import InvalidRequest

_MAX_TOKENS = 320 << 10  # of all conversations together: 0.4 s of work. A single one may fill the context
_INLINE_BYTES = 2 << 10  # of a body that is checked at once
_MAX_SHARED_CHARS = 16 << 20  # of what each conversation's template is given anew

# Fields of one chat, or of an answer to one.
_REFUSED = (
    "stream",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "use_beam_search",
    "echo",
    "store",
    "prompt_logprobs",
    "return_prompt_text",
    "return_assistant_tokens_mask",
)


class BatchChatCompletionRequest(ChatCompletionRequest, kw_only=True):
    """POST /v1/chat/completions/batch: a chat's fields for several conversations, without tools and streams."""

    messages: Annotated[list[list[ChatMessage]], Meta(min_length=1)]  # type: ignore[assignment]


class BatchedChats:
    """Handles POST /v1/chat/completions/batch."""

    def __init__(self, serving: ServingContext) -> None:
        self._serving = serving
        self._decoder = BodyDecoder(BatchChatCompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections():
            # A chat of some thirty bytes takes as long to check as kilobytes of text.
            size = exchange.num_body_bytes
            size = INLINE_BYTES + 1 if _INLINE_BYTES < size <= INLINE_BYTES else size
            chats = await serving.bodies.run(partial(self._check, exchange), size, exchange.owner)
            request_id = serving.admit(exchange, chats[0].request, len(chats))
            generations = []
            most, num_tokens = max(_MAX_TOKENS, chats[0].model.require_info().max_model_len), 0
            for index, chat in enumerate(chats):
                await asyncio.sleep(0)  # short prompts are encoded here, so other tasks run in between
                with fields_named({"messages": f"messages.{index}"}):
                    generations.append(await self._generation(exchange, f"{request_id}-{index}", chat))
                num_tokens += len(generations[-1].prompt_token_ids)
                if num_tokens > most:
                    message = f"the conversations have over {most} tokens together; send fewer at once"
                    raise InvalidRequest(message, field="messages")
        first = chats[0].request
        generations = limit_logprobs(generations, chats[0].model.require_info().max_model_len)
        shape = ChatShape(
            num_choices=len(chats),
            num_prompt_tokens=sum(len(one.prompt_token_ids) for one in generations),
            logprobs=form_of(first, chat_num_logprobs(first)),
            prompt_token_ids=[] if first.return_token_ids else None,
        )
        envelope = serving.envelope("chat.completion", "chatcmpl", exchange, chats[0].model, first)
        parses = any(one.output_parsing is not None for one in generations)
        answer = DOCUMENTS[parses](exchange, serving.meter(exchange, len(chats)), envelope, shape)
        await answer.run(serving.admitted(exchange, serving.generator, generations), generations)

    async def _generation(self, exchange: Exchange, name: str, chat: CheckedChat) -> GenerationRequest:
        serving, request, model = self._serving, chat.request, chat.model
        max_model_len = model.require_info().max_model_len
        token_ids = truncated(await encoded_chat(chat), request, max_model_len)
        check_context(len(token_ids), max_model_len, "messages")
        sampling = sampling_of(request, chat_num_logprobs(request))
        limit_reasoning(sampling, model, token_ids, request.thinking_token_budget)
        most = request.max_completion_tokens or request.max_tokens or serving.config.default_max_tokens
        parsing = model.output_parsing(chat.use, token_ids, request.include_reasoning is not False)
        form = (parsing, chat.requested, chat.use)
        return serving.generation_request(
            exchange, name, model, request, token_ids, sampling, stop_of(request, most), *form, whole=True
        )

    def _check(self, exchange: Exchange) -> list[CheckedChat]:
        """Reads and validates the request; runs on another thread if it is large. Raises ServiceError."""
        serving, batch = self._serving, self._decoder.read(exchange)
        for name in _REFUSED:
            if getattr(batch, name) not in (None, False, [], "none", "auto"):
                raise InvalidRequest(f"{name} is not allowed in a batch of chats; leave it out", field=name)
        if (batch.n or 1) != 1:
            raise InvalidRequest(f"n is {batch.n}; a batch of chats has one choice for each conversation", field="n")
        most = serving.config.max_prompts
        if len(batch.messages) > most:
            message = f"messages has {len(batch.messages)} conversations; at most {most} are allowed"
            raise InvalidRequest(message, field="messages")
        shared = {name: getattr(batch, name) for name in ChatCompletionRequest.__struct_fields__ if name != "messages"}
        chats: list[CheckedChat] = []
        for index, messages in enumerate(batch.messages):
            ignored = exchange.ignored
            request = ChatCompletionRequest(messages=messages, **shared)
            with fields_named({"messages": f"messages.{index}"}):
                chats.append(checked_chat(serving, exchange, request))
            if not index:
                _check_lists(chats[0], len(batch.messages))
            if index:  # the same fields are ignored for every conversation
                exchange.ignored = ignored
        return chats


def _check_lists(chat: CheckedChat, count: int) -> None:
    request, requested = chat.request, chat.requested
    constraint, field = (None, "") if requested is None else (requested.constraint, requested.field)
    check_shared_lists(sampling_of(request, None), stop_of(request, None), constraint, field, count)
    for name in ("documents", "chat_template_kwargs"):
        shared = getattr(request, name)
        if shared and (num_chars := count * size_of((shared,))) > _MAX_SHARED_CHARS:
            message = f"{name} has about {num_chars} characters over {count} conversations; at most {_MAX_SHARED_CHARS}"
            raise InvalidRequest(f"{message} are rendered", field=name)


def batched_chat_routes(serving: ServingContext) -> list[Route]:
    """Returns the route."""
    return [
        Route(
            "POST",
            "/v1/chat/completions/batch",
            BatchedChats(serving),
            "Answers several chats at once: one choice for each.",
            BatchChatCompletionRequest,
            answers.ChatCompletion,
            errors=(400, 404, 408, 413, 429, 500, 503, 504),
            parameters=PLACING,
        )
    ]
