"""Reasoning between two tags at the output's start: <think>...</think>, [THINK]...[/THINK]."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.parsing.events import Event
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import SteppingParser


class ThinkTagsParser(SteppingParser):
    """Parses reasoning between tags. Drops white space next to them.

    `opened`: the output begins in the reasoning, because the prompt opened it or the model leaves out the first tag.
    `anywhere`: the first tag is a special token that counts at any place. `implicit_ends` end the reasoning and belong
    to what follows.
    """

    def __init__(
        self, start: str, end: str, *, opened: bool, anywhere: bool = False, implicit_ends: Sequence[str] = ()
    ) -> None:
        self.in_reasoning = opened
        self._start = start
        self._end = end
        self._anywhere = anywhere
        self._ends = markers(end, *implicit_ends)
        super().__init__()

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. An incomplete tag at the end is text."""
        return super().finish()

    def parse(self) -> Steps[None]:
        source = self.source
        if self.in_reasoning or (yield from self.attempt(self._opening(), "")):
            yield from self._reasoning()
        if self._anywhere:
            while (yield from source.until(markers(self._start), self.out.content)):
                yield from self._reasoning()
        yield from self.answer()

    def answer(self) -> Steps[None]:
        """Reads the rest, which is the answer."""
        yield from self.source.everything(self.out.content)

    def _opening(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from self.source.expect(self._start)

    def _reasoning(self) -> Steps[None]:
        source, out = self.source, self.out
        self.in_reasoning = True
        yield from source.skip_space()
        if (yield from source.take(self._start)):
            yield from source.skip_space()
        stop = yield from source.until(self._ends, out.reasoning)
        if not stop:
            return
        out.end_reasoning()
        self.in_reasoning = False
        if stop != self._end:
            source.unread(len(stop))
        yield from source.skip_space()
