"""Reasoning that a model writes between <scratchpad> and </scratchpad>."""

from __future__ import annotations

from baton.gateway.parsing.output_format import ReasoningFormat
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser

OPEN, CLOSE = "<scratchpad>", "</scratchpad>"

FORMAT = ReasoningFormat(
    lambda opened: ThinkTagsParser(OPEN, CLOSE, opened=opened),
    special_tokens=(OPEN, CLOSE),
    open_tag=OPEN,
    close_tag=CLOSE,
)
