"""gpt-oss's harmony: messages in channels. Analysis is reasoning, final is the answer, a recipient makes it a call.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton.gateway.parsing.grammar.call_syntax import parameters_of
from baton.gateway.parsing.grammar.forms import Form, const, either, json_of, repeat, sequence, text
from baton.gateway.parsing.reading.event_writer import NewId
from baton.gateway.parsing.reading.source import Malformed, Steps, TextSink, markers
from baton.gateway.parsing.reading.text_parser import ToolParser, call_name
from baton.gateway.parsing.tool import Tool

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
ANSWER = f"{CHANNEL}final{MESSAGE}"

_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER_CHARS = 1024
_END = either([const(END), const(CALL), const(RETURN)])


def output_form(tools: Sequence[Tool], answer: Form | None) -> Form:
    """Returns the form of an output whose calls follow the schemas and whose final message has the form `answer`, if
    given.
    """
    no_call = f"to={_FUNCTIONS}"
    header = text([no_call] if answer is None else [no_call, "final"], special=[CONSTRAIN])
    messages = [
        sequence(const(CHANNEL), header, const(MESSAGE), text()),
        sequence(text([no_call]), const(CHANNEL), header, const(MESSAGE), text()),
    ]
    if answer is not None:
        messages.append(sequence(const(f"{CHANNEL}final{MESSAGE}"), answer))
        messages.append(sequence(const(f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}"), answer))
    message = either([*messages, *_calls(tools)])
    return sequence(message, repeat(_next(message), optional=True), repeat(_END, optional=True))


def forced_form(tools: Sequence[Tool], parallel: bool) -> Form:
    """Returns the form of an output that calls one of the tools, after at most one message of reasoning."""
    call = either(_calls(tools))
    analysis = sequence(const(f"{CHANNEL}analysis{MESSAGE}"), text(), const(f"{END}{START}assistant"), call)
    others = [repeat(_next(call), optional=True)] if parallel else []
    return sequence(either([call, analysis]), *others, repeat(_END, optional=True))


def _calls(tools: Sequence[Tool]) -> list[Form]:
    return [sequence(either(_headers(tool.name)), json_of(parameters_of(tool))) for tool in tools]


def _headers(function: str) -> list[Form]:
    recipient = f" to={_FUNCTIONS}{function}"
    headers = []
    for channel in ("analysis", "commentary"):
        for kind in ("", f" {CONSTRAIN}json", " json"):
            headers.append(const(f"{CHANNEL}{channel}{recipient}{kind}{MESSAGE}"))
            headers.append(const(f"{recipient}{CHANNEL}{channel}{kind}{MESSAGE}"))
    return headers


def _next(message: Form) -> Form:
    return sequence(_END, const(f"{START}assistant"), message)


class HarmonyParser(ToolParser):
    """Parses reasoning and calls. Without tools, messages to functions are part of the answer."""

    def __init__(self, tools: Sequence[Tool] = (), new_id: NewId | None = None) -> None:
        self.in_reasoning = False
        super().__init__(tools, new_id)

    def parse(self) -> Steps[None]:
        while marker := (yield from self.source.until(markers(START, CHANNEL, END, CALL, RETURN), self.out.content)):
            if marker in (START, CHANNEL):
                yield from self.attempt(self._message(marker), marker)

    def _message(self, marker: str) -> Steps[None]:
        source, out = self.source, self.out
        # Nothing was read since begin(), so this starts again with another limit.
        source.commit()
        source.begin(_MAX_HEADER_CHARS)
        header, stop = yield from source.read_until(markers(MESSAGE, END, CALL, RETURN))
        if stop != MESSAGE:
            raise Malformed
        header = marker + header
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        function = recipient is not None and recipient[1].startswith(_FUNCTIONS)
        if recipient is not None and function and self.tools:
            name = call_name(recipient[1].removeprefix(_FUNCTIONS))
            source.commit()
            out.start(name)
            yield from self._body(out.arguments)
            out.end()
            return
        source.commit()
        # Messages to built-in tools (python, browser) are not executed, and are not part of the answer.
        if (channel is not None and channel[1] == "analysis") or (recipient is not None and not function):
            yield from self._reasoning()
        else:
            yield from self._body(out.content)

    def _reasoning(self) -> Steps[None]:
        self.in_reasoning = True
        yield from self._body(self.out.reasoning)
        self.out.end_reasoning()
        self.in_reasoning = False

    def _body(self, sink: TextSink) -> Steps[None]:
        stop = yield from self.source.until(markers(END, CALL, RETURN, START, CHANNEL), sink)
        if stop in (START, CHANNEL):
            self.source.unread(len(stop))
