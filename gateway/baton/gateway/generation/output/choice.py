"""Turns one choice's token ids into deltas: text, stop strings, log-probabilities, reasoning and tool calls.

Knows nothing of workers or clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.core import Delta, TokenLogprob
from baton.gateway.generation.output.logprobs import NamedLogprobs
from baton.gateway.generation.output.prompt_logprobs import PromptLogprobParts
from baton.gateway.generation.output.repetition import RepetitionDetector
from baton.gateway.generation.output.stop_strings import StopStrings
from baton.gateway.models.tokenization.detokenizer import Detokenizer
from baton.gateway.parsing.events import Event, append
from baton.gateway.parsing.output_parser import OutputParser
from baton.v1 import types_pb2

REPEATED = "repetition_detected"  # stop reason of a repetitive output


class Choice:
    """One choice's output. Its state survives failover: emitted tokens, incomplete text, possible stop strings."""

    __slots__ = (
        "_detokenizer",
        "_is_plain",
        "_min_tokens",
        "_name_logprobs",
        "_parser",
        "_repetition",
        "_silent_ids",
        "_stops",
        "finished",
        "index",
        "output_token_ids",
        "prompt_logprobs",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        stop_ids: frozenset[int],
        include_stop: bool,
        name_logprobs: NamedLogprobs | None,
        parser: OutputParser | None = None,
        prompt_logprobs: PromptLogprobParts | None = None,
        repetition: RepetitionDetector | None = None,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.output_token_ids: list[int] = []
        self.finished = False
        self.prompt_logprobs = prompt_logprobs  # until the first delta takes them
        self._detokenizer = detokenizer
        self._stops = stops
        # The text of a token that ends the output is left out unless requested.
        self._silent_ids = frozenset() if include_stop else stop_ids
        self._name_logprobs = name_logprobs
        self._parser = parser
        self._repetition = repetition
        self._min_tokens = min_tokens  # minimum length of an output that ends for repetition
        # Fast path for most tokens: nothing but text is derived from them.
        self._is_plain = stops is None and parser is None and repetition is None and name_logprobs is None

    @property
    def num_reasoning_tokens(self) -> int:
        """Returns the number of reasoning tokens, or 0 without a parser."""
        return self._parser.num_reasoning_tokens if self._parser is not None else 0

    def take(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> Delta:
        """Returns the delta of new tokens. Sets `finished` when a stop string was completed."""
        if self._is_plain and self.prompt_logprobs is None:
            self.output_token_ids.extend(token_ids)
            is_silent = token_ids[-1] in self._silent_ids
            text = self._text_of(token_ids) if is_silent else self._detokenizer.push(token_ids)
            return Delta(self.index, text, token_ids)
        delta = self._take(token_ids, logprobs)
        if self.prompt_logprobs is not None:
            delta.prompt_logprobs = self.prompt_logprobs.complete()
            self.prompt_logprobs = None
        return delta

    def _take(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> Delta:
        if self._stops is not None or self._parser is not None or self._repetition is not None:
            return self._take_one_by_one(token_ids, logprobs)
        self.output_token_ids.extend(token_ids)
        return Delta(self.index, self._text_of(token_ids), token_ids, self._named(token_ids, logprobs))

    @property
    def may_end_itself(self) -> bool:
        """Whether the text can end the output, so that its tokens are needed at once."""
        return self._stops is not None or self._repetition is not None

    def end(self, reason: str, stop_token_id: int | None) -> Delta:
        """Returns the last delta after the worker ended the output."""
        self.finished = True
        text, stop = self._rest()
        return self._last(text, (), None, reason if stop is None else "stop", stop_token_id if stop is None else stop)

    def _rest(self) -> tuple[str, str | None]:
        """Returns the text that was held back, and the stop string it completes, if any."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, None
        text, stop = self._stops.push(text)
        return (text + self._stops.finish() if stop is None else text), stop

    def _take_one_by_one(self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None) -> Delta:
        texts = []
        events: list[Event] | None = None if self._parser is None else []
        for taken, token_id in enumerate(token_ids, 1):
            text, stop = self._text_of((token_id,)), None
            if self._stops is not None:
                text, stop = self._stops.push(text)
            texts.append(text)
            self._parse(text, events)
            if stop is not None:
                self.finished = True
                kept = token_ids[:taken]
                self.output_token_ids.extend(kept)
                return self._last("".join(texts), kept, self._named(kept, logprobs), "stop", stop, events)
            if self._repeats(token_id, taken):
                self.finished = True
                text, stop = self._rest()
                texts.append(text)
                self._parse(text, events)
                kept = token_ids[:taken]
                self.output_token_ids.extend(kept)
                reason, why = ("repetition", REPEATED) if stop is None else ("stop", stop)
                return self._last("".join(texts), kept, self._named(kept, logprobs), reason, why, events)
        self.output_token_ids.extend(token_ids)
        return Delta(self.index, "".join(texts), token_ids, self._named(token_ids, logprobs), events=events)

    def _repeats(self, token_id: int, num_taken: int) -> bool:
        if self._repetition is None:
            return False
        return self._repetition.add(token_id) and len(self.output_token_ids) + num_taken >= self._min_tokens

    def _parse(self, text: str, events: list[Event] | None) -> None:
        if self._parser is not None and events is not None:
            for event in self._parser.push(text):
                append(events, event)

    def _last(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprob] | None,
        reason: str,
        stop_reason: str | int | None,
        events: list[Event] | None = None,
    ) -> Delta:
        """Returns the last delta. `events` are those of `text`, or None if it was not parsed yet."""
        parser = self._parser
        if parser is not None:
            if events is None:
                events = parser.push_rest(text)
            for event in parser.finish(cut=reason != "stop"):
                append(events, event)
            reason = parser.finish_reason(reason)
        return Delta(self.index, text, token_ids, logprobs, reason, stop_reason, events)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if token_ids[-1] in self._silent_ids:
            token_ids = token_ids[:-1]
        return self._detokenizer.push(token_ids) if token_ids else ""

    def _named(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs] | None
    ) -> list[TokenLogprob] | None:
        if self._name_logprobs is None or logprobs is None:
            return None
        return [self._name_logprobs(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=False)]
