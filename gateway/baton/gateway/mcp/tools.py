"""Tools of MCP servers and the results of their calls, as values. Imports no MCP library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool that a server lists."""

    name: str
    description: str | None
    input_schema: Mapping[str, Any]
    annotations: Mapping[str, Any] | None = None

    @property
    def is_read_only(self) -> bool:
        """Returns whether the server says that the tool changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


@dataclass(frozen=True, slots=True)
class McpResult:
    """What a call gave: an output, or an error in OpenAI's form."""

    output: str = ""
    error: Mapping[str, Any] | None = None


class McpFailed(Exception):
    """A server could not be reached or refused a request. `error` is in OpenAI's form."""

    def __init__(self, message: str, kind: str = "http_error", code: int = 502) -> None:
        super().__init__(message)
        self.message = message
        self.error: Mapping[str, Any] = {"type": kind, "code": code, "message": message}


def shortened(text: str, max_bytes: int) -> str:
    """Returns the text, cut with a note if it is longer."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode(errors="ignore")
    return f"{kept}\n[cut: {len(encoded)} bytes, of which {max_bytes} are shown]"
