"""Parsers for outputs constrained to the schemas of tool_schemas.py."""

from __future__ import annotations

from baton.gateway.parsing.reading.call_object import read_call_list
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import Steps
from baton.gateway.parsing.reading.text_parser import SteppingParser, ToolParser


class NamedCallParser(SteppingParser):
    """Parses outputs that consist of the arguments of one function."""

    forced = True

    def __init__(self, name: str, new_id: NewId | None = None) -> None:
        self._name = name
        super().__init__(new_id)

    def parse(self) -> Steps[None]:
        yield from self.attempt(self._call(), "")
        yield from self.source.everything(self.out.content)

    def _call(self) -> Steps[None]:
        yield from self.source.skip_space()
        yield from self.source.expect("{")
        self.source.unread(1)
        self.source.commit()
        self.out.start(self._name)
        yield from self.source.pass_json(self.out.arguments)
        self.out.end()


class CallListParser(ToolParser):
    """Parses outputs of the form [{"name": "f", "parameters": {...}}, ...]."""

    forced = True

    def parse(self) -> Steps[None]:
        yield from self.attempt(read_call_list(self.source, self.out), "")
        yield from self.source.everything(self.out.content)
