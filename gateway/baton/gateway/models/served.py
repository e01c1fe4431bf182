"""A served model: its own files, and what routers report about its workers."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from baton.gateway.models.adapters import AdapterViews
from baton.gateway.models.constraints.calls_or_text import calls_or_text
from baton.gateway.models.constraints.structured_output import with_reasoning
from baton.gateway.models.constraints.tools import check_tools, holds_whole_output, tool_constraint
from baton.gateway.models.encoding.lanes import PromptLanes
from baton.gateway.models.encoding.messages import Setup, stamp_of
from baton.gateway.models.encoding.prompt_encoder import ChatPrompt, PromptEncoder, TextPrompt
from baton.gateway.models.files import ModelFiles, read_chat_template, read_model_files
from baton.gateway.models.generation_defaults import GenerationFlags, read_defaults
from baton.gateway.models.prompts.chat_template import ChatTemplate, Message
from baton.gateway.models.prompts.context_length import COUNTED_TOKENS, context_too_long, too_long_to_count
from baton.gateway.models.sampling import SamplingDefaults
from baton.gateway.models.text_prompts import TextPrompts
from baton.gateway.models.tokenization.encoding_limit import EncodingLimit, TooManyTokens
from baton.gateway.models.tokenization.tokenizer import Tokenizer
from baton.gateway.parsing.format_choice import FormatFlags, choose_format
from baton.gateway.parsing.output_format import OutputFormat, OutputParsing
from baton.gateway.parsing.recognition import Traits
from baton.gateway.parsing.tool import ToolUse
from baton.rpc.errors import InvalidRequest, NotFound, Unavailable
from baton.rpc.model_names import check_names, is_allowed
from baton.v1 import types_pb2

_log = logging.getLogger(__name__)

# How long a model may be without workers before the gateway is not ready.
_ABSENCE_SECONDS = 10.0
_RETRY_AFTER_MS = 1000
# Enough tokens of a prompt's end to detect whether it opens the reasoning.
_PROMPT_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TemplateFlags:
    """The operator's settings of chat templates."""

    path: str = ""  # template file that replaces the model's own; empty: the model's own
    variables: Mapping[str, Any] = field(default_factory=dict)  # defaults that requests may override
    trust_control_tokens: bool = False  # whether control tokens in messages are trusted; else they are text


class ServedModel:
    """A model. `info` is the last report about its workers, or None before the first one."""

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
        files: ModelFiles | None = None,  # None: the model was not read from files
        setup: Setup | None = None,  # of helper processes that encode long prompts; None: there are none
        text_prompts: TextPrompts | None = None,  # None: texts are embedded without
    ) -> None:
        self.name = name  # the name used by workers and in responses
        self.names = (name, *aliases)  # names that clients may request
        self.output_format = output_format
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults
        self.text_prompts = text_prompts or TextPrompts()
        self._files = files
        self.info: types_pb2.ModelInfo | None = None
        encoder = PromptEncoder(tokenizer, template, template_variables, trust_control_tokens)
        self._prompts = PromptLanes(encoder, setup)
        self.owner = ""  # owner of the view; empty: anonymous
        self.base_name = name  # the name used by workers, also of a view with an adapter
        self.adapter: types_pb2.AdapterInfo | None = None  # that the view's requests use

    def for_owner(self, owner: str) -> ServedModel:
        """Returns the model with caches for this owner, so that response times reveal nothing about other tenants'
        texts.
        """
        if owner == self.owner:
            return self
        view = copy.copy(self)
        view.owner = owner
        return view

    def with_adapter(self, adapter: types_pb2.AdapterInfo) -> ServedModel:
        """Returns the model as requests of an adapter have it, under the adapter's name."""
        view = copy.copy(self)
        view.name, view.names, view.adapter = adapter.name, (adapter.name,), adapter
        return view

    @property
    def files(self) -> ModelFiles:
        """Returns the files that the model was read from."""
        assert self._files is not None
        return self._files

    def require_info(self) -> types_pb2.ModelInfo:
        """Returns the workers' model info. Raises Unavailable before the first report."""
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
            # Added tokens may have ids above the number of tokens.
            if token_id >= size and not self.tokenizer.token_name(token_id):
                message = f"{field}.{index} is {token_id}; it must be below the vocabulary's size, {size}"
                raise InvalidRequest(message, field=f"{field}.{index}")

    def check_tools(self, use: ToolUse) -> None:
        """Raises InvalidRequest for tools that this model does not support."""
        check_tools(use, self.output_format, self.name)

    def output_parsing(
        self, use: ToolUse, prompt_token_ids: Sequence[int], include_reasoning: bool = True
    ) -> OutputParsing | None:
        """Returns the parser and constraint for outputs of this chat, or None if all text is the answer."""
        prompt_end = ""
        if self.output_format.reasoning is not None:
            prompt_end = self.tokenizer.decode(prompt_token_ids[-_PROMPT_END_TOKENS:])
        output_parsing = self.output_format.output_parsing(use, prompt_end, include_reasoning)
        constraint = tool_constraint(use, self.output_format, self.tokenizer.added_id)
        if output_parsing is None or constraint is None:
            return output_parsing
        if not holds_whole_output(use, self.output_format):
            constraint = with_reasoning(constraint, self.output_format, self.tokenizer, prompt_token_ids)
        return replace(output_parsing, constraint=constraint)

    def constraint(
        self, requested: types_pb2.Constraint, field: str, use: ToolUse, prompt_token_ids: Sequence[int]
    ) -> types_pb2.Constraint:
        """Returns the constraint of a chat's output: the client's constraint (named `field`), or tool calls."""
        combined = calls_or_text(requested, field, use, self.output_format, self.tokenizer)
        if holds_whole_output(use, self.output_format):
            return combined
        return with_reasoning(combined, self.output_format, self.tokenizer, prompt_token_ids)

    async def encode_text(
        self, text: str, *, add_special_tokens: bool = True, whole: bool = False, field: str = "prompt"
    ) -> list[int]:
        """Returns a plain prompt's token ids; control tokens in it are honored.

        `whole` allows texts longer than the context. Raises ContextTooLong, which names the text's field.
        """
        with self._limit(whole, field) as limit:
            return await self._prompts.encode(TextPrompt(text, add_special_tokens), self.owner, limit)

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the token ids of short texts, of any number. Raises InvalidRequest, which names none of them."""
        return await self.tokenizer.encode_many(texts, add_special_tokens=add_special_tokens, owner=self.owner)

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
        mask: list[int] | None = None,
    ) -> list[int]:
        """Returns a chat's token ids, rendered by the model's template or the client's own `template`.

        `whole` allows prompts longer than the context. `mask` gets 1 for each token of the assistant, otherwise 0.
        Raises ContextTooLong, InvalidRequest.
        """
        prompt = ChatPrompt(
            messages,
            tools,
            documents,
            variables,
            add_generation_prompt,
            continue_final_message,
            add_special_tokens,
            template,
        )
        with self._limit(whole, "messages") as limit:
            token_ids = await self._prompts.encode(prompt, self.owner, limit)
            if mask is not None:
                mask += await self._prompts.assistant_mask(prompt, token_ids, self.owner, limit)
            return token_ids

    def close(self) -> None:
        """Ends the threads and processes that encode. Idempotent."""
        self._prompts.close()
        self.tokenizer.close()

    @contextmanager
    def _limit(self, whole: bool, field: str) -> Iterator[EncodingLimit]:
        max_model_len = 0 if self.info is None else self.info.max_model_len
        whole = whole or not max_model_len
        pools = self.info is not None and self.info.HasField("pooler")
        fitting = max_model_len if pools else max_model_len - 1  # one for the output
        most = max(max_model_len, COUNTED_TOKENS) if whole else fitting
        try:
            yield EncodingLimit(most)
        except TooManyTokens as error:
            if whole:
                raise too_long_to_count(error.at_least, most, field) from None
            raise context_too_long(error.at_least, max_model_len, field, at_least=True) from None


def load_served_model(
    source: str,
    names: Sequence[str] = (),
    formats: FormatFlags | None = None,
    templates: TemplateFlags | None = None,
    defaults: GenerationFlags | None = None,
    *,
    revision: str = "",
    with_processes: bool = False,
) -> ServedModel:
    """Loads a model folder or a hub id's revision. Raises ServiceError that names the missing or wrong file or flag.

    `with_processes`: helper processes encode long prompts.
    """
    files = read_model_files(source, revision)
    flags = templates or TemplateFlags()
    chat_templates = {"default": read_chat_template(flags.path)} if flags.path else files.chat_templates
    origin = flags.path or str(files.folder)
    template = ChatTemplate(chat_templates, files.special_tokens, origin)
    traits = Traits(tuple(chat_templates.values()), files.model_type)
    output_format = choose_format(formats or FormatFlags(), traits)
    reasoning = output_format.reasoning
    if reasoning is not None and reasoning.open_tag and template.opens(reasoning.open_tag, flags.variables):
        output_format = replace(output_format, reasoning=replace(reasoning, prompted=True))
    setup = None
    if with_processes:
        setup = Setup(
            str(files.tokenizer_path),
            stamp_of(files.tokenizer_path),
            dict(chat_templates),
            dict(files.special_tokens),
            origin,
            dict(flags.variables),
            flags.trust_control_tokens,
        )
    tokenizer = Tokenizer(files.tokenizer_path)
    if files.vocab_size:
        tokenizer.check_fits(files.vocab_size, str(files.folder / "config.json"))
    return ServedModel(
        name=names[0] if names else files.default_name,
        aliases=names[1:],
        tokenizer=tokenizer,
        template=template,
        output_format=output_format,
        defaults=read_defaults(files, defaults or GenerationFlags()),
        template_variables=flags.variables,
        trust_control_tokens=flags.trust_control_tokens,
        files=replace(files, chat_templates=chat_templates),
        setup=setup,
        text_prompts=files.text_prompts,
    )


class UnknownModel(NotFound):
    """Neither a model nor an adapter has the name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.", field="model")
        self.name = name


class ModelCatalog:
    """The models of this gateway. Keeps the last reports while the router is unreachable."""

    def __init__(self, models: Sequence[ServedModel], clock: Callable[[], float] = time.monotonic) -> None:
        self._models = {model.name: model for model in models}
        self._by_any_name = {name: model for model in models for name in model.names}
        check_names([name for model in models for name in model.names])
        self._clock = clock
        self._absent_since: float | None = None
        self._unknown_names: frozenset[str] = frozenset()
        self._adapters: AdapterViews[ServedModel] = AdapterViews(self._by_any_name.__contains__, clock)

    @property
    def ready(self) -> bool:
        """Returns False before the first report of a worker, or after a while without live workers."""
        if all(model.info is None for model in self._models.values()):
            return False
        return self._absent_since is None or self._clock() - self._absent_since < _ABSENCE_SECONDS

    def close(self) -> None:
        """Ends the models' threads and processes. Idempotent."""
        for model in self._models.values():
            model.close()

    def models(self) -> list[ServedModel]:
        """Returns all models, with or without workers."""
        return list(self._models.values())

    def adapters(self) -> list[ServedModel]:
        """Returns a view of a model for each adapter that its workers serve."""
        return self._adapters.views()

    def add_adapter(self, model_name: str, adapter: types_pb2.AdapterInfo) -> None:
        """Serves an adapter that workers have just loaded, before they report it."""
        self._adapters.add(self._models[model_name], adapter)

    def remove_adapter(self, name: str) -> None:
        """Stops serving an adapter that workers have just unloaded, before they report it. Idempotent."""
        self._adapters.remove(name)

    def get(self, name: str) -> ServedModel:
        """Returns the model with this name, alias or adapter; the only model for an empty name. Raises UnknownModel."""
        model = self._by_any_name.get(name) or self._adapters.get(name)
        if model is None and not name and len(self._models) == 1:
            model = next(iter(self._models.values()))
        if model is None:
            raise UnknownModel(name)
        return model

    def resolving_model(self, name: str) -> ServedModel | None:
        """Returns the model whose workers may load an adapter of this name. None: no workers may."""
        for model in self._models.values():
            patterns = () if model.info is None else model.info.resolvable_adapters
            if is_allowed(name, patterns):
                return model
        return None

    def primary_name(self, name: str) -> str:
        """Returns the first name of the model with this name, or the same name if it is unknown."""
        model = self._by_any_name.get(name)
        return model.name if model is not None else name

    def update(self, infos: Sequence[types_pb2.ModelInfo]) -> None:
        """Applies the router's report of the models that live workers serve."""
        known = [info for info in infos if info.name in self._models]
        for info in reversed(known):
            self._models[info.name].info = info
        self._adapters.update([self._models[info.name] for info in known])
        if known:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock()
        unknown = frozenset(info.name for info in infos) - self._models.keys()
        if unknown - self._unknown_names:
            _log.warning(
                "workers serve the models %s, but this gateway has files for %s", sorted(unknown), list(self._models)
            )
        self._unknown_names = unknown
