"""Passes deltas from a generation to its sink, and merges them while the sink is not writable."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from baton.gateway.core import Delta, Sink, TokenLogprob, Usage
from baton.gateway.parsing.events import Event, append
from baton.rpc.errors import ServiceError

# Maximum number of tokens with log-probabilities in one merged delta; more take too long to write at once.
_MERGED_LOGPROBS = 256


@dataclass(slots=True)
class _Merged:
    """Merged deltas of one choice that wait for the sink."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    has_logprobs: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    events: list[Event] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.has_logprobs = True
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.events is not None:
            self.events = self.events or []
            for event in delta.events:
                append(self.events, event)

    def delta(self, index: int) -> Delta:
        logprobs = self.logprobs if self.has_logprobs else None
        text = "".join(self.texts)
        return Delta(
            index,
            text,
            self.token_ids,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.events,
            self.prompt_logprobs,
        )


class DeltaBuffer:
    """Passes on each choice's deltas in order, then the end. Does nothing once closed.

    `finished` counts the finished choices by reason. Deltas are gathered until they have `interval` tokens; each
    choice's first one is passed on at once.
    """

    __slots__ = ("_begun", "_end", "_finished", "_gathered", "_held", "_interval", "_sink", "closed")

    def __init__(self, sink: Sink, finished: Counter[str] | None = None, interval: int = 1) -> None:
        self._sink = sink
        self._interval = interval
        self._begun: set[int] = set()  # choices whose first delta was passed on
        self._gathered: dict[int, _Merged] = {}  # deltas of fewer than `interval` tokens by choice
        self._finished = Counter() if finished is None else finished
        self._held: dict[int, deque[_Merged]] = {}  # merged deltas by choice
        self._end: Usage | ServiceError | None = None
        self.closed = False

    def emit(self, delta: Delta) -> None:
        """Passes a delta on, or holds it back while the sink is not writable."""
        if self.closed:
            return
        if delta.finish_reason is not None:
            self._finished[delta.finish_reason] += 1
        if self._interval == 1:
            self._pass(delta)
        elif delta.index not in self._begun:
            self._begun.add(delta.index)
            self._pass(delta)
        else:
            self._gather(delta)

    def flush(self, index: int) -> None:
        """Passes on what was gathered of a choice."""
        gathered = self._gathered.pop(index, None)
        if gathered is not None:
            self._pass(gathered.delta(index))

    def _gather(self, delta: Delta) -> None:
        gathered = self._gathered.setdefault(delta.index, _Merged())
        gathered.add(delta)
        if delta.finish_reason is not None or len(gathered.token_ids) >= self._interval:
            self.flush(delta.index)

    def _pass(self, delta: Delta) -> None:
        if not self._held and self._sink.writable:
            self._sink.on_delta(delta)
        else:
            held = self._held.setdefault(delta.index, deque())
            if not held or len(held[-1].logprobs) >= _MERGED_LOGPROBS:
                held.append(_Merged())
            held[-1].add(delta)

    def end(self, end: Usage | ServiceError) -> None:
        """Passes the end on, after all held deltas."""
        if self._end is None:
            for index in tuple(self._gathered):
                self.flush(index)
            self._end = end
            self.resume()

    def resume(self) -> None:
        """Passes held deltas on while the sink is writable."""
        while self._held and not self.closed and self._sink.writable:
            index, held = next(iter(self._held.items()))
            merged = held.popleft()
            if not held:
                del self._held[index]
            self._sink.on_delta(merged.delta(index))
        if self._end is None or self._held or self.closed:
            return
        self.closed = True
        if isinstance(self._end, Usage):
            self._sink.on_done(self._end)
        else:
            self._sink.on_error(self._end)

    def close(self) -> None:
        """Drops held deltas after the client disconnected."""
        self.closed = True
        self._held.clear()
        self._gathered.clear()
