"""vLLM's forms of prompts: a text, token ids, or a mapping with one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.gateway.fields.chat import check_chat_size, check_continued, check_messages, template_messages
from baton.gateway.fields.validation import check_context, check_variables
from baton.gateway.models.served import ServedModel
from baton.gateway.schemas.requests import ChatMessage, TokenId
from baton.llm.parameters.names import InvalidParameter, check_known

Messages = Sequence[Mapping[str, Any]]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_UNSUPPORTED = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "encoder_prompt")
_SHORT_CHARS = 8 << 10  # of a text that is encoded together with others
_TOKENIZATION = ("add_special_tokens",)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is not encoded yet."""

    text: str | None = None
    token_ids: list[int] | None = None  # replaces the text
    cache_salt: str = ""
    add_special_tokens: bool = True

    @property
    def is_long(self) -> bool:
        """Whether the text is encoded by itself, within the limits of long texts."""
        return len(self.text or "") > _SHORT_CHARS

    async def encode(self, model: ServedModel) -> tuple[str | None, list[int]]:
        """Returns the text and the token ids. Raises InvalidRequest, ContextTooLong."""
        if self.token_ids is not None:
            check_context(len(self.token_ids), model.require_info().max_model_len, "prompt")
            return self.text, self.token_ids
        assert self.text is not None, "a prompt has a text or tokens"
        token_ids = await model.encode_text(self.text, add_special_tokens=self.add_special_tokens)
        check_context(len(token_ids), model.require_info().max_model_len, "prompt")
        return self.text, token_ids


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How chats become prompts."""

    chat_template: str | None = None  # replaces the model's own
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None  # only shown to the model; calls stay text
    variables: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raises InvalidRequest for options that exclude each other."""
        check_variables(self.variables)
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt cannot both be True", field="continue_final_message"
            )


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat that is not rendered yet."""

    messages: Messages
    form: ChatForm
    cache_salt: str = ""

    async def encode(self, model: ServedModel) -> tuple[str | None, list[int]]:
        """Returns the rendered text and the token ids. Raises InvalidRequest, ContextTooLong."""
        form, info = self.form, model.require_info()
        try:
            messages = msgspec.convert(list(self.messages), list[ChatMessage])
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidParameter(f"messages: {error}", field="messages") from None
        check_messages(messages)
        if form.continue_final_message:
            check_continued(messages[-1].role)
        check_chat_size(messages, info.max_model_len, len(form.tools or ()))
        token_ids = await model.encode_chat(
            template_messages(messages),
            add_generation_prompt=form.add_generation_prompt,
            continue_final_message=form.continue_final_message,
            tools=form.tools or None,
            variables=form.variables,
            template=form.chat_template,
        )
        check_context(len(token_ids), info.max_model_len, "messages")
        return model.tokenizer.decode(token_ids), token_ids


def prompt_of(value: Any, tokenization: Mapping[str, Any] | None = None) -> Prompt:
    """Reads one prompt. Raises InvalidParameter for another form."""
    add = bool((tokenization or {}).get("add_special_tokens", True))
    if isinstance(value, str):
        return Prompt(value, add_special_tokens=add)
    if isinstance(value, Mapping):
        return _prompt_of_mapping(value, add)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return Prompt(token_ids=_token_ids(value, "prompt"))
    raise InvalidParameter(
        f"a prompt is of type {type(value).__name__}; give a text, token ids, or a mapping with prompt or "
        "prompt_token_ids",
        field="prompt",
    )


def check_tokenization(values: Mapping[str, Any] | None) -> None:
    """Raises UnknownParameter for options of tokenization other than add_special_tokens."""
    check_known(values or {}, _TOKENIZATION, "tokenization_kwargs")


def prompts_of(value: Any) -> Iterable[Any]:
    """Returns the prompts of a call: one prompt, a sequence, or any iterable, which is read as needed."""
    if isinstance(value, (str, Mapping)) or _is_tokens(value):
        return [value]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise InvalidParameter(f"prompts is of type {type(value).__name__}; give prompts", field="prompts")
    return value


def chats_of(value: Any) -> Iterable[Messages]:
    """Returns the chats of a call: one list of messages, a sequence of such lists, or any iterable of them."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(f"messages is of type {type(value).__name__}; give a list of messages", field="messages")
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
        return [value]
    return value


def lengths(*values: Any) -> Iterator[int]:
    """Yields the lengths of those values that have one."""
    for value in values:
        if isinstance(value, Sequence):
            yield len(value)


def _prompt_of_mapping(value: Mapping[str, Any], add_special_tokens: bool) -> Prompt:
    for name in _UNSUPPORTED:
        if value.get(name):
            raise InvalidParameter(f"{name} is not supported; give a text or token ids", field=name)
    check_known((name for name in value if name not in _UNSUPPORTED), _KEYS, "a prompt")
    text, token_ids = value.get("prompt"), value.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise InvalidParameter("a prompt needs prompt or prompt_token_ids", field="prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidParameter(f"prompt is of type {type(text).__name__}; give a text", field="prompt")
    tokens = None if token_ids is None else _token_ids(token_ids, "prompt_token_ids")
    return Prompt(text, tokens, value.get("cache_salt") or "", add_special_tokens)


def _token_ids(value: Any, field: str) -> list[int]:
    try:
        return msgspec.convert(list(value), list[TokenId])
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidParameter(f"{field}: {error}", field=field) from None


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)
