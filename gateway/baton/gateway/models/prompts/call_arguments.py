"""Arguments of tool calls in a chat's history: a JSON object, or the model's text if it wrote no valid JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.gateway.bodies.json_size import check_json_size, num_values
from baton.gateway.bodies.json_values import MAX_VALUES
from baton.rpc.errors import InvalidRequest

Arguments = dict[str, Any] | str

_FEW_VALUES = 4
_KEY, _VALUE = "probe_key", "probe_value"


def check_arguments(texts: Iterable[str], field: str) -> None:
    """Raises InvalidRequest if the arguments of a chat's calls have too many values for templates."""
    total = 0
    for text in texts:
        # An upper bound: most of these characters are inside strings.
        most = text.count(",") + text.count("[") + text.count("{")
        if most > _FEW_VALUES:
            data = text.encode(errors="surrogatepass")
            check_json_size(data, field)
            most = num_values(data)
        total += most
        if total > MAX_VALUES:
            raise InvalidRequest(f"{field}: the arguments of calls have more than {MAX_VALUES} values", field=field)


def read_arguments(text: str) -> Arguments:
    """Parses a JSON object. Returns the text itself if it is not one."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) else text


def as_object(arguments: Arguments) -> dict[str, Any]:
    """Returns the arguments as an object; a text becomes its only member, `input`."""
    return arguments if isinstance(arguments, dict) else {"input": arguments}


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """The forms of arguments that a chat template renders."""

    objects: bool
    texts: bool

    def fit(self, arguments: object) -> object:
        """Returns the arguments in a form that the template renders completely."""
        if isinstance(arguments, str):
            return arguments if self.texts else as_object(arguments)
        if self.objects or not self.texts:
            return arguments
        return json.dumps(arguments, ensure_ascii=False)

    def fit_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tool call with its arguments in such a form."""
        function = call.get("function")
        if not isinstance(function, Mapping) or "arguments" not in function:
            return dict(call)
        return {**call, "function": {**function, "arguments": self.fit(function["arguments"])}}


def forms_of(render: Callable[[list[dict[str, Any]]], str]) -> ArgumentForms:
    """Detects the forms that a template renders, by rendering small chats. `render` may raise for unsupported forms."""
    with_object = _render(render, {_KEY: _VALUE})
    with_text = _render(render, _VALUE)
    # A template that concatenates the arguments to a text would write an object in Python's notation.
    as_python = f"'{_KEY}'" in with_object
    return ArgumentForms(
        objects=_KEY in with_object and _VALUE in with_object and not as_python, texts=_VALUE in with_text
    )


def _render(render: Callable[[list[dict[str, Any]]], str], arguments: Arguments) -> str:
    # Some templates require ids of nine characters, a type, and alternating roles.
    call = {"id": "call12345", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": "probe", "content": "probe"},
    ]
    try:
        return render(chat)
    except Exception:  # any exception means that the template does not support this form
        return ""
