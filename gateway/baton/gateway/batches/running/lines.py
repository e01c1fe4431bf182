"""The lines of a batch's input: read in ranges, and checked. Knows no batch's state and runs nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass

import msgspec

from baton.gateway.batches.types import BatchError

READ_BYTES = 1 << 20
_PIECE_BYTES = 16 << 10
MAX_LINES = 50_000
MAX_LINE_BYTES = 16 << 20
MAX_CUSTOM_ID = 512  # characters
_SHOWN = 80
_INCOMPLETE_ANSWERS = ("stream", "background")  # members of a body

_TEXT = re.compile(rb"\S")  # of the bytes that bytes.strip() leaves
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)

Read = Callable[[int, int], Awaitable[bytes]]  # from (offset, length)


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank."""

    number: int  # from 1, blank lines included
    index: int  # from 0, without blank lines
    data: bytes


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request in one line of a batch's file, after its checks."""

    custom_id: str
    url: str
    body: bytes  # JSON


class LineProblem(Exception):
    """A line that cannot be run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def at(self, line: int | None) -> BatchError:
        """Returns the error of an input file."""
        return BatchError(code=self.code, message=self.message, param=self.param, line=line)


async def lines_of(read: Read) -> AsyncIterator[Line]:
    """Yields the lines of an input. Raises LineProblem for a line that is too long to be read."""
    number = index = 0
    rest = bytearray()  # a line's part in earlier pieces
    async for piece in _pieces(read):
        begin = piece.find(b"\n") + 1
        if begin:
            rest += piece[: begin - 1]
            number += 1
            if rest.strip():
                yield Line(number, index, bytes(rest))
                index += 1
            rest.clear()
        # Jumps from text to text: a blank line costs no more than its bytes.
        while begin and (text := _TEXT.search(piece, begin)):
            first = piece.rfind(b"\n", begin, text.start()) + 1 or begin
            number += piece.count(b"\n", begin, first)
            begin = piece.find(b"\n", text.start()) + 1
            if not begin:
                break
            number += 1
            yield Line(number, index, piece[first : begin - 1])
            index += 1
        else:
            first = piece.rfind(b"\n", begin) + 1 or begin
            number += piece.count(b"\n", begin)
        rest += piece[first:]
        if len(rest) > MAX_LINE_BYTES:
            raise LineProblem("line_too_long", f"line {number + 1} has more than {MAX_LINE_BYTES} bytes")
    if rest.strip():
        yield Line(number + 1, index, bytes(rest))


async def _pieces(read: Read) -> AsyncIterator[bytes]:
    """Yields the input in pieces of a few milliseconds' work. Requests of clients run between two of them."""
    offset = 0
    while data := await read(offset, READ_BYTES):
        offset += len(data)
        for begin in range(0, len(data), _PIECE_BYTES):
            yield data[begin : begin + _PIECE_BYTES]
            await asyncio.sleep(0)


def request_of(line: bytes, targets: Collection[str]) -> LineRequest:
    """Returns the request of a line for one of the targets. Raises LineProblem that names the member."""
    members = _members_of(line)
    custom_id = _text_of(members, "custom_id")
    if not custom_id or len(custom_id) > MAX_CUSTOM_ID:
        message = f"custom_id has {len(custom_id)} characters; it must have 1 to {MAX_CUSTOM_ID}"
        raise LineProblem("invalid_request", message, "custom_id")
    method, url = _text_of(members, "method"), _text_of(members, "url")
    if method != "POST":
        raise LineProblem("invalid_method", f"method is {method[:_SHOWN]!r}; it must be POST", "method")
    if url not in targets:
        message = f"url is {url[:_SHOWN]!r}; it must be {' or '.join(targets)}"
        raise LineProblem("url_mismatch", message, "url")
    body = members.get("body")
    if body is None:
        raise LineProblem("missing_required_parameter", "body is required", "body")
    if not bytes(memoryview(body)[:1]) == b"{":
        raise LineProblem("invalid_request", "body must be a JSON object", "body")
    _check_answers_whole(body)
    return LineRequest(custom_id, url, bytes(body))


def _members_of(line: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _object.decode(line)
    except msgspec.ValidationError:
        raise LineProblem("invalid_json_line", "This line is not a JSON object.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise LineProblem("invalid_json_line", "This line is not parseable as valid JSON.") from None


def _text_of(members: dict[str, msgspec.Raw], name: str) -> str:
    raw = members.get(name)
    if raw is None:
        raise LineProblem("missing_required_parameter", f"{name} is required", name)
    try:
        return _text.decode(raw)
    except msgspec.ValidationError:
        raise LineProblem("invalid_request", f"{name} must be a string", name) from None
    except UnicodeDecodeError:
        raise LineProblem("invalid_json_line", f"{name} is not valid UTF-8", name) from None


def _check_answers_whole(body: msgspec.Raw) -> None:
    members = _members_of(body)
    for name in _INCOMPLETE_ANSWERS:
        given = members.get(name)
        if given is not None and bytes(given) not in (b"false", b"null"):
            field = f"body.{name}"
            raise LineProblem("invalid_request", f"{field} must be false: a batch's answers are whole", field)
