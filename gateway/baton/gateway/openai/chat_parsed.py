"""The two forms of a chat's response if reasoning and tool calls are parsed."""

from __future__ import annotations

from baton.gateway.core import Delta
from baton.gateway.http.exchange import Exchange
from baton.gateway.metrics.gateway import AnswerMeter
from baton.gateway.openai.chat_answer import ChatDocument, ChatShape, ChatStream
from baton.gateway.openai.logprob_json import chat_json
from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from baton.gateway.rest.sse import Envelope, json_text
from baton.gateway.schemas.answers import CalledFunction, ChatAnswer, ToolCall


class ParsedChatStream(ChatStream):
    """Streams one chunk per piece of reasoning, text or call.

    A call's first chunk has its name, the others have arguments.
    """

    def piece(self, index: int, delta: Delta) -> bytes:
        self._num_output_tokens += len(delta.token_ids)
        logprobs = b"null"
        if delta.logprobs:
            logprobs = chat_json(delta.logprobs, self._form)
        more = self._token_ids(delta)
        pieces = []
        for event in delta.events or ():
            data = _delta_of(event, self._shape.function_call)
            if data:
                pieces.append(self._chunk(index, data, logprobs, b"null", more=more))
                logprobs, more = b"null", b""
        if more or logprobs != b"null":
            # Tokens whose text is markup or still incomplete.
            pieces.append(self._chunk(index, b'{"content":""}', logprobs, b"null", more=more))
        return b"".join(pieces)


class ParsedChatDocument(ChatDocument):
    """Collects one chat.completion document whose message has reasoning and calls."""

    def __init__(self, exchange: Exchange, meter: AnswerMeter, envelope: Envelope, shape: ChatShape) -> None:
        super().__init__(exchange, meter, envelope, shape)
        self._messages = [_Message() for _ in range(shape.num_choices)]

    def collect(self, index: int, delta: Delta) -> None:
        super().collect(index, delta)
        for event in delta.events or ():
            self._messages[index].add(event)

    def _message(self, index: int) -> ChatAnswer:
        return self._messages[index].answer(self._shape.function_call)


class _Message:
    """The message of one choice so far."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, event: Event) -> None:
        match event:
            case ContentText(text):
                self._texts.append(text)
            case ReasoningText(text):
                self._reasoning.append(text)
            case CallStart():
                self._calls.append((event, []))
            case CallArguments(_, fragment):
                self._calls[-1][1].append(fragment)
            case CallEnd():
                pass

    def answer(self, as_function: bool) -> ChatAnswer:
        answer = ChatAnswer(content="".join(self._texts))
        if self._reasoning:
            answer.reasoning = answer.reasoning_content = "".join(self._reasoning)
        if self._calls:
            answer.content = answer.content or None
            calls = [
                ToolCall(id=start.id, function=CalledFunction(start.name, "".join(arguments)))
                for start, arguments in self._calls
            ]
            if as_function:
                answer.function_call = calls[0].function
            else:
                answer.tool_calls = calls
        return answer


def _delta_of(event: Event, as_function: bool) -> bytes:
    """Returns the chunk's delta; empty for events that clients do not receive."""
    match event:
        case ContentText(text):
            return b'{"content":%b}' % json_text(text)
        case ReasoningText(text):
            data = json_text(text)
            return b'{"reasoning":%b,"reasoning_content":%b}' % (data, data)
        case CallStart(_, _, name) if as_function:
            return b'{"function_call":{"name":%b,"arguments":""}}' % json_text(name)
        case CallStart(index, call_id, name):
            return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}' % (
                index,
                json_text(call_id),
                json_text(name),
            )
        case CallArguments(_, fragment) if as_function:
            return b'{"function_call":{"arguments":%b}}' % json_text(fragment)
        case CallArguments(index, fragment):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, json_text(fragment))
        case CallEnd():
            return b""
