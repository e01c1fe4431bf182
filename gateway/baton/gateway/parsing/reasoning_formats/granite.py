"""Granite 3.2: reasoning after "Here is my thought process:", answer after "Here is my response:"."""

from __future__ import annotations

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import SteppingParser

STARTS = ("Here is my thought process:", "Here's my thought process:")
ENDS = ("Here is my response:", "Here's my response:")


class GraniteReasoningParser(SteppingParser):
    """Parses both spellings. An output that begins otherwise is the answer."""

    def __init__(self, opened: bool = False) -> None:
        self.in_reasoning = opened
        super().__init__()

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. An incomplete phrase at the end is text."""
        return super().finish()

    def parse(self) -> Steps[None]:
        source = self.source
        if self.in_reasoning or (yield from self.attempt(self._opening(), "")):
            self.in_reasoning = True
            yield from source.skip_space()
            if not (yield from source.until(markers(*ENDS), self.out.reasoning)):
                return
            self.out.end_reasoning()
            self.in_reasoning = False
            yield from source.skip_space()
        yield from source.everything(self.out.content)

    def _opening(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from self.source.expect(*STARTS)
