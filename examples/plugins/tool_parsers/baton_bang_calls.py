"""Tool calls that a model writes as !name{"argument": 1}."""

from __future__ import annotations

from baton.gateway.parsing.output_format import ToolFormat
from baton.gateway.parsing.reading.source import Steps, markers
from baton.gateway.parsing.reading.text_parser import ToolParser


class BangParser(ToolParser):
    """Parses any number of calls with text around them."""

    def parse(self) -> Steps[None]:
        while (yield from self.source.until(markers("!"), self.out.content)):
            yield from self.attempt(self._call(), "!")

    def _call(self) -> Steps[None]:
        name, _ = yield from self.source.read_until(markers("{"))
        self.source.unread(1)
        self.source.commit()
        self.out.start(name)
        yield from self.source.pass_json(self.out.arguments)
        self.out.end()


FORMAT = ToolFormat(BangParser)
