"""A model that the gateway speaks for: its own files' side, and what routers tell of its workers."""

from __future__ import annotations

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from baton.gateway.models.constraints.calls_or_text import calls_or_text
from baton.gateway.models.constraints.structured_output import with_reasoning
from baton.gateway.models.constraints.tools import check_tools, holds_whole_output, tool_constraint
from baton.gateway.models.files import read_chat_template, read_model_files
from baton.gateway.models.prompts.chat_template import ChatTemplate, Message
from baton.gateway.models.prompts.client_text import ClientText
from baton.gateway.models.prompts.context_length import COUNTED_TOKENS, context_too_long, too_long_to_count
from baton.gateway.models.prompts.rendering import ChatRendering, encode_rendered, size_of
from baton.gateway.models.sampling import SamplingDefaults
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.output_format import OutputFormat, Reading
from baton.gateway.parsing.tool import ToolUse
from baton.rpc.errors import InvalidRequest, NotFound, Unavailable
from baton.rpc.model_names import check_names
from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

# How long a model may be without workers before the gateway says that it is not ready.
_ABSENCE_SECONDS = 10.0
_RETRY_AFTER_MS = 1000
_MAX_CLIENTS_TEMPLATES = 16  # that are kept compiled
# Shorter chats take less time to render and encode than to hand to another thread.
_INLINE_CHARS = 1024
# Enough of a prompt's end to tell whether it opens the reasoning, in tokens.
_PROMPT_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TemplateFlags:
    """What the operator says of chat templates."""

    path: str = ""  # of a file to use instead of the model's own; empty: the model's own
    variables: Mapping[str, Any] = field(default_factory=dict)  # that requests may set otherwise
    trust_control_tokens: bool = False  # in messages; else they are text


class ServedModel:
    """One model. `info` is what its workers last said; None until any was heard of."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        defaults: SamplingDefaults,
        output_format: OutputFormat,
        template_variables: Mapping[str, Any] | None = None,
        trust_control_tokens: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        self.name = name  # as workers and answers have it
        self.names = (name, *aliases)  # that clients may ask for
        self.output_format = output_format
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self.info: types_pb2.ModelInfo | None = None
        self._template_variables = dict(template_variables or {})
        self._trust_control_tokens = trust_control_tokens
        self._client_texts: WeakKeyDictionary[ChatTemplate, ClientText] = WeakKeyDictionary()
        self.owner = ""  # whose requests see it so; empty: of nobody in particular
        # By owner and text; the one used last is at the end.
        self._clients_templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()

    def seen_by(self, owner: str) -> ServedModel:
        """The model for a client of this tenant: what other tenants' texts left in its caches makes nothing faster."""
        if owner == self.owner:
            return self
        view = copy.copy(self)
        view.owner = owner
        return view

    def require_info(self) -> types_pb2.ModelInfo:
        """The workers' facts. Raises Unavailable while no worker has been heard of."""
        if self.info is None:
            raise Unavailable(
                f"no worker serves the model {self.name} yet",
                phase=types_pb2.PHASE_PLACEMENT,
                retry_after_ms=_RETRY_AFTER_MS,
            )
        return self.info

    def check_token_ids(self, token_ids: Sequence[int], field: str) -> None:
        """Raises InvalidRequest for an id that neither the tokenizer nor the model has."""
        size = max(self.tokenizer.vocab_size, self.info.vocab_size if self.info is not None else 0)
        if max(token_ids, default=0) < size:
            return
        for index, token_id in enumerate(token_ids):
            # Added tokens may have ids beyond the number of tokens.
            if token_id >= size and not self.tokenizer.token_name(token_id):
                message = f"{field}.{index} is {token_id}; the vocabulary has {size} tokens, with ids from 0."
                raise InvalidRequest(message, field=f"{field}.{index}")

    def check_tools(self, use: ToolUse) -> None:
        """Raises InvalidRequest for tools that this model cannot be given, or cannot be held to."""
        check_tools(use, self.output_format, self.name)

    def reading(self, use: ToolUse, prompt_token_ids: Sequence[int], include_reasoning: bool = True) -> Reading | None:
        """How outputs of this chat are read, and what the worker holds them to; None where all text is the answer."""
        prompt_end = ""
        if self.output_format.reasoning is not None:
            prompt_end = self.tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:])
        reading = self.output_format.reading(use, prompt_end, include_reasoning)
        constraint = tool_constraint(use, self.output_format, self.tokenizer.added_id)
        if reading is None or constraint is None:
            return reading
        if not holds_whole_output(use, self.output_format):
            constraint = with_reasoning(constraint, self.output_format, self.tokenizer, prompt_token_ids)
        return replace(reading, constraint=constraint)

    def constraint(
        self, asked: types_pb2.Constraint, field: str, use: ToolUse, prompt_token_ids: Sequence[int]
    ) -> types_pb2.Constraint:
        """What a chat's outputs are held to: to what the client asked, named `field`, or to calls of its tools."""
        combined = calls_or_text(asked, field, use, self.output_format, self.tokenizer)
        if holds_whole_output(use, self.output_format):
            return combined
        return with_reasoning(combined, self.output_format, self.tokenizer, prompt_token_ids)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True, whole: bool = False) -> list[int]:
        """A plain prompt's token ids; control tokens in it are such.

        `whole`: also where the text is longer than the context. Raises ContextTooLong.
        """
        with self._limit(whole, "prompt") as limit:
            return await self.tokenizer.encode_async(
                text, add_special_tokens=add_special_tokens, owner=self.owner, limit=limit
            )

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        template: str | None = None,
        whole: bool = False,
    ) -> list[int]:
        """A chat's token ids, rendered by the model's template, or by the client's own `template`.

        `whole`: also where they are more than the context has. Raises ContextTooLong, InvalidRequest.
        """
        used = self.template if template is None else self._clients_template(template)
        texts = (messages, tools, documents, variables)
        chat = ChatRendering(used, self._client_text(used), add_generation_prompt, continue_final_message)
        render = partial(chat.render, *texts, self._template_variables)

        def encode(limit: EncodingLimit) -> list[int]:
            return encode_rendered(render(), self.tokenizer, add_special_tokens, self.owner, limit)

        size = size_of(texts)
        with self._limit(whole, "messages") as limit:
            # A stranger's template may take long before it is stopped.
            if template is None and size <= _INLINE_CHARS:
                return encode(limit)
            return await self.tokenizer.beside_limited(encode, limit, 0 if template else size, self.owner)

    @contextmanager
    def _limit(self, whole: bool, field: str) -> Iterator[EncodingLimit]:
        max_model_len = 0 if self.info is None else self.info.max_model_len
        whole = whole or not max_model_len
        most = max(max_model_len, COUNTED_TOKENS) if whole else max_model_len - 1
        try:
            yield EncodingLimit(most)
        except TooManyTokens as error:
            if whole:
                raise too_long_to_count(error.at_least, most, field) from None
            raise context_too_long(error.at_least, max_model_len, field, at_least=True) from None

    def _client_text(self, template: ChatTemplate) -> ClientText | None:
        """What covers the texts that clients give to a template; None: their control tokens are trusted."""
        if self._trust_control_tokens:
            return None
        found = self._client_texts.get(template)
        if found is None:
            found = self._client_texts[template] = ClientText(self.tokenizer.control_tokens, template.literals)
        return found

    def _clients_template(self, text: str) -> ChatTemplate:
        """A template that came with a request, compiled."""
        templates, key = self._clients_templates, (self.owner, text)
        found = templates.pop(key, None)
        if found is None:
            try:
                found = ChatTemplate({"default": text}, self.template.special_tokens, "the request")
            except InvalidRequest as error:
                error.field = "chat_template"
                raise
        templates[key] = found
        if len(templates) > _MAX_CLIENTS_TEMPLATES:
            templates.popitem(last=False)
        return found


def load_served_model(
    source: str, names: Sequence[str] = (), formats: FormatFlags | None = None, templates: TemplateFlags | None = None
) -> ServedModel:
    """Reads a model folder or hub id. Raises ServiceError that names the file or flag that is missing or wrong."""
    files = read_model_files(source)
    flags = templates or TemplateFlags()
    chat_templates = {"default": read_chat_template(flags.path)} if flags.path else files.chat_templates
    template = ChatTemplate(chat_templates, files.special_tokens, flags.path or str(files.folder))
    output_format = choose_format(formats or FormatFlags(), chat_templates.values())
    reasoning = output_format.reasoning
    if reasoning is not None and reasoning.open_tag and template.opens(reasoning.open_tag, flags.variables):
        output_format = replace(output_format, reasoning=replace(reasoning, prompted=True))
    return ServedModel(
        name=names[0] if names else files.default_name,
        aliases=names[1:],
        tokenizer=Tokenizer(files.tokenizer_path),
        template=template,
        output_format=output_format,
        defaults=SamplingDefaults.from_config(files.generation_config, str(files.folder / "generation_config.json")),
        template_variables=flags.variables,
        trust_control_tokens=flags.trust_control_tokens,
    )


class ModelCatalog:
    """The models of this gateway. Keeps what is known of them while the router is away."""

    def __init__(self, models: Sequence[ServedModel], clock: Callable[[], float] = time.monotonic) -> None:
        self._models = {model.name: model for model in models}
        self._by_any_name = {name: model for model in models for name in model.names}
        check_names([name for model in models for name in model.names])
        self._clock = clock
        self._absent_since: float | None = None
        self._unknown_names: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """False while no worker was ever heard of, or the router says for a while that there is none."""
        if all(model.info is None for model in self._models.values()):
            return False
        return self._absent_since is None or self._clock() - self._absent_since < _ABSENCE_SECONDS

    def models(self) -> list[ServedModel]:
        """All, whether workers serve them or not."""
        return list(self._models.values())

    def get(self, name: str) -> ServedModel:
        """The model of that name, or alias; of no name, where there is only one. Raises NotFound."""
        model = self._by_any_name.get(name)
        if model is None and not name and len(self._models) == 1:
            model = next(iter(self._models.values()))
        if model is None:
            raise NotFound(f"The model `{name}` does not exist.", field="model")
        return model

    def primary_name(self, name: str) -> str:
        """The first name of the model of this name; the same name where there is no such model."""
        model = self._by_any_name.get(name)
        return model.name if model is not None else name

    def update(self, infos: Sequence[types_pb2.ModelInfo]) -> None:
        """Takes the router's word on which models live workers serve."""
        known = [info for info in infos if info.name in self._models]
        for info in reversed(known):
            self._models[info.name].info = info
        if known:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock()
        unknown = frozenset(info.name for info in infos) - self._models.keys()
        if unknown - self._unknown_names:
            _log.warning(
                "workers serve models %s, but this gateway has files for %s", sorted(unknown), list(self._models)
            )
        self._unknown_names = unknown
