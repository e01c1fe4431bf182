"""Parses the text of one choice, first for reasoning, then for calls, and drops the parts that the request excludes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.gateway.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText, append
from baton.gateway.parsing.reading.text_parser import TextParser

_log = logging.getLogger(__name__)


class ReasoningParser(TextParser, Protocol):
    """A parser that separates reasoning from the rest."""

    @property
    def in_reasoning(self) -> bool:
        """Returns whether the next text belongs to the reasoning, as far as known."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The parts of an output to send to the client."""

    reasoning: bool = True
    parallel_calls: bool = True  # False: only the first call
    call_finish_reason: str = "tool_calls"  # finish reason of an output that stopped after calls


class OutputParser:
    """Chains the parsers of one choice. A parser that raises is skipped from then on."""

    def __init__(self, reasoning: ReasoningParser | None, tools: TextParser | None, options: OutputOptions) -> None:
        self.num_reasoning_tokens = 0
        self._reasoning = reasoning
        self._tools = tools
        self._options = options
        self._has_calls = False
        self._num_undecided_tokens = 0  # tokens since the last event; they may form the opening tag of the reasoning

    def push(self, text: str) -> list[Event]:
        """Parses one token's text, which may be empty. Counts tokens of reasoning, including its tags."""
        was_reasoning = self._in_reasoning
        events = self.push_rest(text)
        self._num_undecided_tokens += 1
        if was_reasoning:
            self.num_reasoning_tokens += 1
        elif self._in_reasoning:
            self.num_reasoning_tokens += self._num_undecided_tokens
        if events or self._in_reasoning:
            self._num_undecided_tokens = 0
        return events

    def push_rest(self, text: str) -> list[Event]:
        """Parses held-back text whose tokens are already counted."""
        return self._select(self._through_tools(self._through_reasoning(text)))

    def finish(self, cut: bool = False) -> list[Event]:
        """Returns the remaining events. `cut`: the output ended at a limit, possibly within a call."""
        events: list[Event] = []
        if self._reasoning is not None:
            try:
                events = self._reasoning.finish(cut)
            except Exception:
                self._give_up(self._reasoning)
        events = self._through_tools(events)
        if self._tools is not None:
            try:
                events.extend(self._tools.finish(cut))
            except Exception:
                self._give_up(self._tools)
        return self._select(events)

    def finish_reason(self, reason: str) -> str:
        """Returns the finish reason for the client."""
        return self._options.call_finish_reason if reason == "stop" and self._has_calls else reason

    @property
    def _in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.in_reasoning

    def _through_reasoning(self, text: str) -> Iterable[Event]:
        if self._reasoning is not None:
            try:
                return self._reasoning.push(text)
            except Exception:
                self._give_up(self._reasoning)
                self._reasoning = None
        return (ContentText(text),) if text else ()

    def _through_tools(self, events: Iterable[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if self._tools is None or not isinstance(event, ContentText):
                append(result, event)
                continue
            try:
                result.extend(self._tools.push(event.text))
            except Exception:
                self._give_up(self._tools)
                self._tools = None
                append(result, event)
        return result

    def _select(self, events: Iterable[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if isinstance(event, CallStart | CallArguments | CallEnd):
                if event.index and not self._options.parallel_calls:
                    continue
                self._has_calls = True
            elif isinstance(event, ReasoningText) and not self._options.reasoning:
                continue
            append(result, event)
        return result

    def _give_up(self, parser: TextParser) -> None:
        _log.exception("%s failed; the rest of this output is not parsed", type(parser).__name__)
