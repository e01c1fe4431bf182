"""MiniMax M3: reasoning between <mm:think> tags, which the prompt may open."""

from __future__ import annotations

from baton.gateway.parsing.reading.source import Steps
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser

THINK = ("<mm:think>", "</mm:think>")


class MiniMaxM3ReasoningParser(ThinkTagsParser):
    """Parses reasoning at any place. A closing tag at the beginning closes nothing, and is dropped."""

    def __init__(self, opened: bool) -> None:
        super().__init__(*THINK, opened=opened, anywhere=True)

    def parse(self) -> Steps[None]:
        if not self.in_reasoning:
            yield from self.source.take(THINK[1])
        yield from super().parse()
