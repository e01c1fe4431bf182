"""Reads incremental text as if it were complete: parsers are generators that yield when they need more.

The result depends only on the text and never on how it is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from baton.gateway.parsing.reading.json_copier import JsonCopier, JsonStringDecoder

T = TypeVar("T")

Steps = Generator[None, None, T]  # waits for more text at each `yield`
TextSink = Callable[[str], None]

# Maximum text held back for a decision; longer text is no markup.
MAX_HELD_CHARS = 1 << 16
# Maximum text held back for one argument's value whose type is known only at its end.
MAX_VALUE_CHARS = 1 << 18

_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text does not follow the format. Never leaves a parser."""


class Unfinished(Malformed):
    """The text follows the format so far but was cut."""


class Markers:
    """Texts to search for. One may be a suffix of another; none may occur elsewhere in another."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._longest = max(map(len, markers))
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._first_chars = re.compile("[" + "".join({re.escape(marker[0]) for marker in markers}) + "]")

    def find(self, text: str, begin: int, end: int) -> re.Match[str] | None:
        """Returns the first match."""
        return self._pattern.search(text, begin, end)

    def possible_start(self, text: str, begin: int, end: int) -> int:
        """Returns where the longest suffix of the text that begins a marker starts, or `end`."""
        begin = max(begin, end - self._longest + 1)
        while found := self._first_chars.search(text, begin, end):
            begin = found.start()
            tail = text[begin:end]
            if any(marker.startswith(tail) for marker in self._markers):
                return begin
            begin += 1
        return end


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """Returns cached markers for these texts."""
    return Markers(*texts)


class Source:
    """The unread part of the text.

    Between begin() and commit() or rewind() at most `limit` characters may be read ahead; more raise Malformed.
    """

    def __init__(self) -> None:
        self.announced = False  # a marker was read, so markup probably follows
        self._text = ""
        self._at = 0
        self._closed = False
        self._cut = False
        self._base = -1  # position of begin(); -1: not reading ahead
        self._limit = 0

    def feed(self, text: str) -> None:
        self._text += text

    def close(self, cut: bool = False) -> None:
        """Ends the text. `cut`: the output ended at a limit, so incomplete formats raise Unfinished."""
        self._closed = True
        self._cut = cut

    def begin(self, limit: int = MAX_HELD_CHARS) -> None:
        """Starts reading ahead, unless it already has."""
        if self._base < 0:
            self._base = self._at
            self._limit = limit

    def commit(self) -> None:
        """Accepts what was read ahead."""
        self._base = -1

    def rewind(self) -> None:
        """Returns to begin(). Does nothing after commit()."""
        if self._base >= 0:
            self._at, self._base = self._base, -1

    def take_rest(self) -> str:
        """Returns all unread text."""
        self.rewind()
        rest, self._text, self._at = self._text[self._at :], "", 0
        return rest

    def unread(self, num_chars: int) -> None:
        """Steps back over the last characters read."""
        self._at -= num_chars

    def until(self, stops: Markers, sink: TextSink) -> Steps[str]:
        """Passes text on up to a marker and reads the marker. Returns the marker, or "" at the end of the text."""
        assert self._base < 0
        while True:
            end = len(self._text)
            match = stops.find(self._text, self._at, end)
            if match is not None:
                self._pass_on(match.start(), sink)
                self._at += len(match[0])
                self.announced = True
                return match[0]
            # If the output was cut, a marker at its end was cut too.
            whole = self._closed and not (self._cut and self.announced)
            self._pass_on(end if whole else stops.possible_start(self._text, self._at, end), sink)
            if self._closed:
                if self._at < len(self._text):
                    raise Unfinished
                return ""
            yield

    def everything(self, sink: TextSink) -> Steps[None]:
        """Passes all text on."""
        while True:
            self._pass_on(len(self._text), sink)
            if self._closed:
                return
            yield

    def read_until(self, stops: Markers) -> Steps[tuple[str, str]]:
        """Returns the text up to a marker and the marker. Raises Malformed without a marker."""
        scanned = self._at
        while True:
            match = stops.find(self._text, scanned, self._end)
            if match is not None:
                text = self._text[self._at : match.start()]
                self._at = match.end()
                return text, match[0]
            scanned = stops.possible_start(self._text, scanned, self._end)
            yield from self._more()

    def take(self, *options: str) -> Steps[str]:
        """Reads the option that follows. Returns "" if none does."""
        longest = max(map(len, options))
        while True:
            for option in options:
                if self._text.startswith(option, self._at, self._end):
                    self._at += len(option)
                    return option
            tail = self._text[self._at : min(self._end, self._at + longest)]
            if not any(one.startswith(tail) for one in options):
                return ""
            if self._at_close():
                if self._cut and tail:
                    raise Unfinished
                return ""
            yield from self._more()

    def expect(self, *options: str) -> Steps[str]:
        """Reads the option that follows. Raises Malformed if none does."""
        taken = yield from self.take(*options)
        if not taken:
            raise Unfinished if self._cut and self._at == len(self._text) else Malformed
        return taken

    def peek(self) -> Steps[str]:
        """Returns the next character without reading it, or "" at the end of the text."""
        while self._at >= self._end:
            if self._at_close():
                if self._cut:
                    raise Unfinished
                return ""
            yield from self._more()
        return self._text[self._at]

    def read_char(self) -> Steps[str]:
        """Reads the next character. Raises Malformed at the end of the text."""
        char = yield from self.peek()
        if not char:
            raise Malformed
        self._at += 1
        return char

    def skip_space(self) -> Steps[None]:
        """Reads white space."""
        while True:
            match = _SPACE.match(self._text, self._at, self._end)
            assert match is not None
            self._at = match.end()
            if self._at < self._end or self._at_close():
                return
            yield from self._more()

    def read_pattern(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads the longest match, once other text follows it. Raises Malformed for an empty match."""
        while True:
            match = pattern.match(self._text, self._at, self._end)
            end = match.end() if match is not None else self._at
            if end < self._end or self._at_close():
                if self._cut and end == len(self._text):
                    raise Unfinished
                if end == self._at:
                    raise Malformed
                text, self._at = self._text[self._at : end], end
                return text
            yield from self._more()

    def read_json_string(self) -> Steps[str]:
        """Reads a JSON string and returns its content. Raises Malformed for other text."""
        pieces: list[str] = []
        yield from self._decode_string(pieces.append)
        return "".join(pieces)

    def pass_json_string(self, sink: TextSink) -> Steps[None]:
        """Passes a JSON string's content on. Raises Malformed where it becomes invalid."""
        assert self._base < 0
        yield from self._decode_string(sink)

    def read_json(self) -> Steps[str]:
        """Reads a JSON value unchanged. Raises Malformed for other text."""
        pieces: list[str] = []
        yield from self._copy_json(pieces.append)
        return "".join(pieces)

    def pass_json(self, sink: TextSink) -> Steps[None]:
        """Passes a JSON value on unchanged.

        Raises Malformed where it becomes invalid, after passing on the valid part.
        """
        assert self._base < 0
        yield from self._copy_json(sink)

    def _copy_json(self, sink: TextSink) -> Steps[None]:
        copier = JsonCopier()
        while True:
            piece, self._at = copier.copy(self._text, self._at, self._end)
            if piece:
                sink(piece)
            if copier.done:
                return
            if copier.broken:
                raise Malformed
            self._trim()
            if copier.is_scalar and self._at_close():
                return
            yield from self._more()

    def _decode_string(self, sink: TextSink) -> Steps[None]:
        yield from self.expect('"')
        decoder = JsonStringDecoder()
        while True:
            piece, self._at = decoder.decode(self._text, self._at, self._end)
            if piece:
                sink(piece)
            if decoder.done:
                return
            if decoder.broken:
                raise Malformed
            self._trim()
            yield from self._more()

    def _more(self) -> Steps[None]:
        """Waits for more text. Raises Malformed at the end of the text or of the limit."""
        if self._base >= 0 and self._end == self._base + self._limit:
            raise Malformed
        if self._closed:
            raise Unfinished if self._cut else Malformed
        yield

    def _at_close(self) -> bool:
        """Returns whether all text has arrived and may be read."""
        return self._closed and self._end == len(self._text)

    @property
    def _end(self) -> int:
        return len(self._text) if self._base < 0 else min(len(self._text), self._base + self._limit)

    def _pass_on(self, end: int, sink: TextSink) -> None:
        if end > self._at:
            sink(self._text[self._at : end])
            self._at = end
        self._trim()

    def _trim(self) -> None:
        if self._base < 0 and self._at:
            self._text = self._text[self._at :]
            self._at = 0
