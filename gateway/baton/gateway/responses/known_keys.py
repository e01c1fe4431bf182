"""The keys that objects of a Responses request may have. items.py and tools.py read them; others are ignored."""

from __future__ import annotations

from typing import Any, ClassVar

from msgspec import Struct


class KnownPart(Struct, kw_only=True):
    """A part of an item's content, output or summary."""

    type: Any = None
    text: Any = None
    refusal: Any = None
    annotations: Any = None  # these two of an earlier output
    logprobs: Any = None


class KnownItem(Struct, kw_only=True):
    """An item of any type. Those of other types are skipped, and listed as a whole."""

    TYPES: ClassVar = tuple(
        b'"%b"' % name
        for name in (
            b"message",
            b"function_call",
            b"function_call_output",
            b"custom_tool_call",
            b"custom_tool_call_output",
            b"reasoning",
        )
    )
    OBJECTS: ClassVar = {"content": KnownPart, "output": KnownPart, "summary": KnownPart}

    type: Any = None
    id: Any = None
    status: Any = None
    role: Any = None
    phase: Any = None
    content: Any = None
    call_id: Any = None
    name: Any = None
    namespace: Any = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    summary: Any = None
    encrypted_content: Any = None


class KnownTool(Struct, kw_only=True):
    """A function or a custom tool."""

    TYPES: ClassVar = (b'"function"', b'"custom"')

    type: Any = None
    name: Any = None
    description: Any = None
    parameters: Any = None
    strict: Any = None
    format: Any = None  # of a custom tool
