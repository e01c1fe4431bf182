"""Renders chats into prompts with the model's template. Knows no token ids."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes

from baton.gateway.models.prompts.call_arguments import ArgumentForms, forms_of
from baton.gateway.models.prompts.template_sandbox import TemplateSandbox
from baton.rpc.errors import InvalidRequest

_MARK = "BATON_FINAL_MESSAGE_ENDS_HERE "
_PART_FILTERS = frozenset(("selectattr", "rejectattr", "map"))
_NONE_CHECK = re.compile(r"""\bcontent['"]?\]?\)?\s+is\s+(not\s+)?none\b""")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = ({"role": "user", "content": "a"},)
_THINKING = {"enable_thinking": True, "thinking": True}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's compiled templates, by name. "default" is used, or "tool_use" for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        self._sandbox = TemplateSandbox()
        self.special_tokens = dict(special_tokens)
        self._templates = {
            name: _Compiled(self._sandbox, text, f"{origin} ({name})", self.special_tokens)
            for name, text in templates.items()
        }

    @cached_property
    def literals(self) -> frozenset[str]:
        """Returns the string literals in the templates' expressions."""
        return frozenset(literal for template in self._templates.values() for literal in template.literals)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        stand_ins: Collection[str] = (),
        edge: str = "",
    ) -> str:
        """Returns the prompt, with special tokens as text. Raises InvalidRequest if the template rejects the chat.

        `variables` come from the client (chat_template_kwargs); `stand_ins` are characters that replace ASCII ones.
        `edge` is written around the assistant's texts, which the template must mark.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", field="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
            )
        compiled = self._choose(tools)
        if edge and not compiled.marks_outputs:
            raise InvalidRequest(
                "the chat template marks no text as the assistant's: it has no {% generation %}",
                field="return_assistant_tokens_mask",
            )
        chat = [compiled.fit_message(message, index) for index, message in enumerate(messages)]
        final_text = _mark_final_text(chat) if continue_final_message else ""
        values = {
            **self.special_tokens,
            **(variables or {}),
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = compiled.render(values, stand_ins, edge)
        return _cut_at_mark(prompt, final_text) if continue_final_message else prompt

    def opens(self, tag: str, variables: Mapping[str, Any]) -> bool:
        """Returns whether a prompt with thinking enabled ends with this tag."""
        try:
            prompt = self.render(_PROBE, variables={**variables, **_THINKING})
        except InvalidRequest:
            return False
        return prompt.rstrip().endswith(tag)

    def _choose(self, tools: object) -> _Compiled:
        chosen = self._templates.get("tool_use") if tools is not None else None
        chosen = chosen or self._templates.get("default")
        if chosen is not None:
            return chosen
        if not self._templates:
            raise InvalidRequest(
                "the model has no chat template; give text instead of messages: prompt of /v1/completions, or input of "
                "/v1/embeddings",
                field="messages",
            )
        raise InvalidRequest(
            f"the model has no default chat template, only {sorted(self._templates)}", field="messages"
        )


class _Compiled:
    """One template, and the form of message content that it supports."""

    def __init__(self, sandbox: TemplateSandbox, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._special_tokens = special_tokens
        try:
            self._template = sandbox.load(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            # The last three come from Python's compiler: blocks nested too deeply, or a number that is too long.
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise InvalidRequest(f"invalid chat template of {origin}{line}: {error}", field="model") from error
        tree = sandbox.parse(source)
        self.marks_outputs = _GENERATION.search(source) is not None
        self.literals = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self._takes_parts = _loops_over_content(tree)
        self._knows_none = _NONE_CHECK.search(source) is not None
        self._takes_texts = not self._takes_parts or re.search(r"\bis\s+(not\s+)?string\b", source) is not None

    def render(self, values: Mapping[str, Any], stand_ins: Collection[str] = (), edge: str = "") -> str:
        try:
            return self._sandbox.render(self._template, values, stand_ins, edge)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template rejects the chat: {error}", field="messages") from error
        except (
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            ArithmeticError,
            LookupError,
            MemoryError,
        ) as error:
            raise InvalidRequest(
                f"the model's chat template cannot render the chat: {type(error).__name__}: {error}", field="messages"
            ) from error

    def fit_message(self, message: Message, index: int) -> dict[str, Any]:
        """Returns a copy without unset keys, with its content in a form that the template supports."""
        fitted = {key: value for key, value in message.items() if value is not None}
        reasoning = next((fitted[key] for key in _REASONING_KEYS if key in fitted), None)
        if reasoning is not None:
            fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
        if fitted.get("tool_calls"):
            fitted["tool_calls"] = [self._argument_forms.fit_call(call) for call in fitted["tool_calls"]]
        content = fitted.get("content")
        if content is None and fitted.get("tool_calls"):
            # Templates that check for none expect it in messages with calls only; others expect a text.
            fitted["content"] = None if self._knows_none else "" if self._takes_texts else []
            return fitted
        if isinstance(content, str):
            if not self._takes_texts:
                fitted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list | tuple):
            texts = [_text_of_part(part, f"messages.{index}.content.{at}") for at, part in enumerate(content)]
            fitted["content"] = (
                [{"type": "text", "text": text} for text in texts] if self._takes_parts else "\n".join(texts)
            )
        return fitted

    @cached_property
    def _argument_forms(self) -> ArgumentForms:
        """Returns the forms of tool call arguments that the template renders."""

        def render(chat: list[dict[str, Any]]) -> str:
            if not self._takes_texts:
                chat = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
            return self.render({**self._special_tokens, "messages": chat, "tools": None, "add_generation_prompt": True})

        return forms_of(render)


def _text_of_part(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(
            f"content parts must have the type text; this one {f'is {kind}' if kind else 'has no type'}", field=field
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest("a content part of type text needs a text", field=f"{field}.text")
    return text


def _loops_over_content(tree: nodes.Template) -> bool:
    """Returns whether the template iterates over a message's content, under this or another name."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    if any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return True
    filters = (node for node in tree.find_all(nodes.Filter) if node.name in _PART_FILTERS)
    return any(_is_content(node, names) for node in filters)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _mark_final_text(chat: list[dict[str, Any]]) -> str:
    """Appends the mark to the last message's text, in place. Returns the text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    for part in reversed(content or []):
        text: str = part["text"]
        part["text"] = text + _MARK
        return text
    raise InvalidRequest(
        "continue_final_message needs a last message with text to continue", field=f"messages.{len(chat) - 1}.content"
    )


def _cut_at_mark(prompt: str, final_text: str) -> str:
    mark = _MARK.strip()
    if mark not in prompt or final_text.strip() not in prompt:
        raise InvalidRequest(
            "continue_final_message: the model's chat template drops or changes the last message's text",
            field="continue_final_message",
        )
    at = prompt.rindex(mark)
    if prompt.startswith(_MARK, at):
        return prompt[:at]
    # The template strips messages, so the text's end was stripped too.
    return prompt[:at].rstrip()
