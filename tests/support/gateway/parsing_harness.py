"""Runs a parser on a text in arbitrary pieces, and joins its events."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from baton.gateway.parsing.reading.text_parser import TextParser
from baton.gateway.parsing.registry import TOOL_FORMATS
from baton.gateway.parsing.tool import Tool

TOOLS = (
    Tool(
        "get_weather",
        "The weather somewhere.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "at": {"type": "object"},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city"],
        },
    ),
    Tool("get_time"),
)


# One name of each format.
DISTINCT = list({id(one): name for name, one in reversed(TOOL_FORMATS.items())}.values())[::-1]


@dataclass
class Parsed:
    """The results of a parser."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    ids: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # kinds of events, without repetitions
    num_ended: int = 0


def put_together(events: Iterable[Event]) -> Parsed:
    """Joins events, and checks that calls do not overlap."""
    parsed = Parsed()
    open_call = -1
    for event in events:
        match event:
            case ContentText(text):
                assert text
                parsed.content += text
            case ReasoningText(text):
                assert text
                parsed.reasoning += text
            case CallStart(index, call_id, name):
                assert open_call < 0
                assert index == len(parsed.calls)
                open_call = index
                parsed.calls.append((name, ""))
                parsed.ids.append(call_id)
            case CallArguments(index, fragment):
                assert open_call == index
                assert fragment
                name, arguments = parsed.calls[index]
                parsed.calls[index] = (name, arguments + fragment)
            case CallEnd(index):
                assert open_call == index
                open_call = -1
                parsed.num_ended += 1
        kind = {"CallStart": "call", "ContentText": "content", "ReasoningText": "reasoning"}.get(type(event).__name__)
        if kind is not None and (kind == "call" or parsed.order[-1:] != [kind]):
            parsed.order.append(kind)
    assert open_call < 0
    return parsed


def parse(parser: TextParser, pieces: Iterable[str], is_cut: bool = False) -> Parsed:
    """Returns the parser's results for the pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return put_together([*events, *parser.finish(is_cut)])


def cut(text: str, seed: int) -> list[str]:
    """Cuts the text into pieces, some of them empty."""
    generator = random.Random(seed)
    cuts = sorted(generator.randint(0, len(text)) for _ in range(generator.randint(0, max(1, len(text)))))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def tool_parser(name: str, tools: Iterable[Tool] = TOOLS) -> Any:
    """Returns a parser with predictable call ids for models without ids."""
    parser = TOOL_FORMATS[name].new_parser(tuple(tools))
    parser.out._new_id = lambda function, index: f"id{index}"  # type: ignore[attr-defined]
    return parser
