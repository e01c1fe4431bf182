"""Kimi K3: reasoning in an element `think`, and then the answer in an element `response`."""

from __future__ import annotations

from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser

TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
THINK = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
_AROUND_ANSWER = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
_TOOLS = "<|open|>tools<|sep|>"


class KimiK3ReasoningParser(ThinkTagsParser):
    """Parses the same, and drops what is around the answer. Calls stay as they are, for their parser."""

    def __init__(self, opened: bool) -> None:
        super().__init__(*THINK, opened=opened, implicit_ends=(_TOOLS,))

    def answer(self) -> Steps[None]:
        source, stops = self.source, markers(*_AROUND_ANSWER, _TOOLS)
        while marker := (yield from source.until(stops, self.out.content)):
            if marker == _TOOLS:
                source.unread(len(marker))
                break
        yield from source.everything(self.out.content)
