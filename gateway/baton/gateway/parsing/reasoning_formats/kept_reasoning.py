"""Reasoning that stays part of the answer, between its tags, for clients that send it back as it was."""

from __future__ import annotations

from baton.gateway.parsing.reading.source import Steps
from baton.gateway.parsing.reading.text_parser import SteppingParser

_OPEN = "<think>"


class KeptReasoningParser(SteppingParser):
    """Writes everything as the answer, with the tag that the prompt opened. `opened`: the prompt, or the model, did."""

    def __init__(self, opened: bool) -> None:
        self.in_reasoning = False
        self._opened = opened
        super().__init__()

    def parse(self) -> Steps[None]:
        if self._opened:
            yield from self.source.take(_OPEN)  # the model repeats it
            self.out.content(_OPEN)
        yield from self.source.everything(self.out.content)
