"""ERNIE 4.5 and Hunyuan A13B: reasoning between <think> tags, then an answer between <response> or <answer> tags."""

from __future__ import annotations

from baton.gateway.parsing.reading.source import Malformed, Steps, markers
from baton.gateway.parsing.reasoning_formats.think_tags import ThinkTagsParser


class AnswerTagsParser(ThinkTagsParser):
    """Parses the same with an answer that may have tags. The closing tag counts only at the output's end."""

    def __init__(self, start: str, end: str, answer_tags: tuple[str, str], *, opened: bool) -> None:
        self._answer_tags = answer_tags
        super().__init__(start, end, opened=opened)

    def answer(self) -> Steps[None]:
        source, end = self.source, self._answer_tags[1]
        if (yield from self.attempt(self._answer_start(), "")):
            yield from source.skip_space()
            while (yield from source.until(markers(end), self.out.content)):
                yield from self.attempt(self._output_end(), end)
        yield from source.everything(self.out.content)

    def _answer_start(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from self.source.expect(self._answer_tags[0])

    def _output_end(self) -> Steps[None]:
        yield from self.source.skip_space()
        if (yield from self.source.peek()):
            raise Malformed
        self.out.end_content()
