"""A function that a model may call, and how it may choose. Knows neither JSON bodies nor protos."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """One function."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON Schema of the arguments object; None: not said
    strict: bool = False  # the arguments must follow the schema
    place: int | None = None  # among the request's tools, where only some of those are given

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class ToolMode(enum.Enum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    NONE = "none"
    REQUIRED = "required"  # at least one
    NAMED = "named"  # one of a given name


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's tools and what it asks of them."""

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    name: str = field(default="")  # of the function that must be called
    parallel: bool = True  # False: only the first call counts

    @property
    def active(self) -> bool:
        """Whether calls may come."""
        return bool(self.tools) and self.mode is not ToolMode.NONE
