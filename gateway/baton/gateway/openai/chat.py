"""POST /v1/chat/completions. chat_request.py validates the requests, and chat_answer.py writes the responses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.fields.chat import (
    chat_num_logprobs,
)
from baton.gateway.fields.sampling import sampling_of, stop_of, truncated
from baton.gateway.fields.validation import check_context
from baton.gateway.http.exchange import Exchange
from baton.gateway.models.served import ServedModel
from baton.gateway.openai.chat_answer import ChatDocument, ChatShape, ChatStream
from baton.gateway.openai.chat_parsed import ParsedChatDocument, ParsedChatStream
from baton.gateway.openai.chat_request import CheckedChat, checked_chat, encoded_chat, mask_for
from baton.gateway.openai.logprobs import form_of
from baton.gateway.openai.stored_chats.store import ChatStore
from baton.gateway.schemas.requests import ChatCompletionRequest
from baton.gateway.serving.answer_size import check_echo
from baton.gateway.serving.context import ServingContext
from baton.gateway.serving.reasoning_limit import limit_reasoning


class ChatCompletions:
    """Handles POST /v1/chat/completions."""

    def __init__(self, serving: ServingContext, store: ChatStore | None = None) -> None:
        self._serving = serving
        self._store = store
        self._decoder = BodyDecoder(ChatCompletionRequest, serving.config.strict_fields, serving.bodies.reader)

    async def __call__(self, exchange: Exchange) -> None:
        serving = self._serving
        with serving.counting_rejections():
            checked = await serving.bodies.run(partial(self._check, exchange), exchange.num_body_bytes, exchange.owner)
            request, use, model = checked.request, checked.use, checked.model
            info = model.require_info()
            n = request.n or 1
            request_id = serving.admit(exchange, request, n)
            check_echo(n * len(_echoed(request)) if request.echo else 0)
            mask = mask_for(request)
            token_ids = truncated(await encoded_chat(checked, mask), request, info.max_model_len)
            check_context(len(token_ids), info.max_model_len, "messages")
            sampling = sampling_of(request, chat_num_logprobs(request))
            limit_reasoning(sampling, model, token_ids, request.thinking_token_budget)
        stop = stop_of(
            request, request.max_completion_tokens or request.max_tokens or serving.config.default_max_tokens
        )
        output_parsing = model.output_parsing(use, token_ids, request.include_reasoning is not False)
        generation = serving.generation_request(
            exchange,
            request_id,
            model,
            request,
            token_ids,
            sampling,
            stop,
            output_parsing,
            checked.requested,
            use,
            whole=not request.stream,
        )
        meter = serving.meter(exchange, n)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        envelope = serving.envelope(kind, "chatcmpl", exchange, model, request)
        marked = None if mask is None else truncated(mask, request, info.max_model_len)
        fields = (exchange, meter, envelope, await _shape_of(request, model, token_ids, marked))
        answer = _FORMS[bool(request.stream), output_parsing is not None](*fields)
        if request.store and self._store is not None:
            document = DOCUMENTS[output_parsing is not None](*fields)
            tenant = exchange.identity.tenant.name
            answer.recorder = self._store.recorder(tenant, document, request.messages, request.metadata)
        if request.functions:
            answer.field_names = {"tools": "functions"}
        await answer.run(serving.admitted(exchange, serving.generator_for(request), [generation]), [generation])

    def _check(self, exchange: Exchange) -> CheckedChat:
        return checked_chat(self._serving, exchange, self._decoder.read(exchange))


# Documents by whether reasoning or calls are parsed from the output, and forms by (streamed, parsed).
DOCUMENTS: Mapping[bool, type[ChatDocument]] = {False: ChatDocument, True: ParsedChatDocument}
_FORMS: Mapping[tuple[bool, bool], type[ChatStream | ChatDocument]] = {
    **{(False, is_parsed): form for is_parsed, form in DOCUMENTS.items()},
    (True, False): ChatStream,
    (True, True): ParsedChatStream,
}


async def _shape_of(
    request: ChatCompletionRequest, model: ServedModel, token_ids: list[int], mask: list[int] | None
) -> ChatShape:
    return ChatShape(
        num_choices=request.n or 1,
        num_prompt_tokens=len(token_ids),
        logprobs=form_of(request, chat_num_logprobs(request)),
        prompt_token_ids=token_ids if request.return_token_ids else None,
        prompt_text=await model.tokenizer.decode_async(token_ids) if request.return_prompt_text else None,
        assistant_mask=mask,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=_echoed(request) if request.echo else "",
        function_call=bool(request.functions),
    )


def _echoed(request: ChatCompletionRequest) -> str:
    """Returns the last message's text if the output continues its role, else an empty text."""
    last = request.messages[-1]
    goes_on = request.continue_final_message or request.add_generation_prompt is False
    if last.role != "assistant" and not goes_on:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(str(part["text"]) for part in last.content or () if isinstance(part.get("text"), str))
