"""Tools that a model may call, and the request's choice among them. Knows neither JSON bodies nor protos."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON Schema of the arguments object; None: not given
    strict: bool = False  # whether the arguments must follow the schema
    place: int | None = None  # index in the request's tools, if only some of them are used

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolMode(enum.Enum):
    """Whether the model must, may or must not call tools."""

    AUTO = "auto"  # the model decides
    NONE = "none"
    REQUIRED = "required"  # at least one call
    NAMED = "named"  # a call of the named function


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools and its choice among them."""

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    name: str = field(default="")  # the function that must be called
    parallel: bool = True  # False: only the first call counts

    @property
    def active(self) -> bool:
        """Returns whether the output may contain calls."""
        return bool(self.tools) and self.mode is not ToolMode.NONE
