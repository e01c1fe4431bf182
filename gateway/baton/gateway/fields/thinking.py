"""Converts the switches that servers have for thinking to variables of the chat template, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.gateway.schemas.foreign_fields import ForeignFields
from baton.rpc.errors import InvalidRequest

SetEqual = Callable[[ForeignFields, str, Any, str], None]  # sets a field of the request, unless it has another value

_NAMES = ("enable_thinking", "think", "thinking")
_VARIABLES = ("enable_thinking", "thinking")  # templates use either
_TYPES: Mapping[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
_LEVELS = ("low", "medium", "high", "max")


def adopt_thinking(request: ForeignFields, given: Mapping[str, Any], set_equal: SetEqual) -> list[str]:
    """Sets the template's variables and the limit of reasoning. Returns the names of ignored fields."""
    names = [name for name in _NAMES if name in given]
    if not hasattr(request, "chat_template_kwargs"):
        return names
    chosen = {name: _thinks(request, name, given[name], set_equal) for name in names}
    made = {name: thinks for name, thinks in chosen.items() if thinks is not None}
    if len(set(made.values())) > 1:
        first, *_, last = made
        raise InvalidRequest(f"{first} and {last} contradict each other; set one", field=last)
    if made:
        variables = dict.fromkeys(_VARIABLES, any(made.values()))
        request.chat_template_kwargs = {**variables, **(request.chat_template_kwargs or {})}
    return []


def _thinks(request: ForeignFields, name: str, value: Any, set_equal: SetEqual) -> bool | None:
    """Returns whether the model thinks first; None leaves it to the template."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if value not in _LEVELS:
            raise InvalidRequest(f"think is {value[:40]!r}; give true, false, {', '.join(_LEVELS)}", field=name)
        if hasattr(request, "reasoning_effort"):
            set_equal(request, "reasoning_effort", value, name)
        return True
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        field = f"{name}.type"
        raise InvalidRequest(f"{field} is {str(kind)[:40]!r}; give {', '.join(_TYPES)}", field=field)
    budget = value.get("budget_tokens")
    if budget is not None and hasattr(request, "thinking_token_budget"):
        field = f"{name}.budget_tokens"
        if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget < 2**31:
            raise InvalidRequest(f"{field} must be a number of tokens", field=field)
        set_equal(request, "thinking_token_budget", budget, field)
    return _TYPES[kind]
