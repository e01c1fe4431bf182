"""Limits the number of values in a JSON text, because parsing makes an object of each and blocks everything else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from baton.rpc.errors import InvalidRequest

# Outside of strings. Parsing this many of one kind takes up to 30 ms, during which the interpreter is blocked.
MAX_CONTAINERS = 64 << 10  # objects and arrays
MAX_KEYS = 64 << 10
MAX_COMMAS = 512 << 10
MAX_STRINGS = 256 << 10
MAX_BACKSLASHES = 2 << 20  # in strings
# Numbers with an exponent or more than 19 digits, which may need slow arithmetic: 15 us each.
MAX_LONG_NUMBERS = 2000
MAX_LONG_NUMBER_BYTES = 256 << 10
# A long string with a character outside of Unicode's basic plane (an emoji) becomes four bytes a character.
MAX_WIDE_BYTES = 10 << 20
# The maximum time to parse one of each kind, in nanoseconds, and the limit of their sum.
_NANOSECONDS = (13, 35, 320, 140, 40, 15_000, 25)
_BYTE_NANOSECONDS = 1.9
_MAX_NANOSECONDS = 45_000_000

_SMALL = 8 << 10
_FEW = 256  # values; fewer need no counting
_PIECE = 1 << 20  # counted at once; other threads run in between
_LONG_DIGITS = 20
_NOT_COUNTED = bytes(set(range(256)) - set(b'{[:,"\\'))
_NOT_SYNTAX = bytes(set(range(256)) - set(b'{[:,"0123456789.eEus'))  # u and s: the e of true and false is no exponent
_DIGITS_ALIKE = bytes.maketrans(b"123456789.", b"0000000000")
_LONG_NUMBER = re.compile(b"0{%d,}" % _LONG_DIGITS)
_BACKSLASHES = re.compile(rb"\\*")
_WIDE = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4", rb"\ud", rb"\uD")  # in UTF-8, and as surrogates
_LONG_STRING = re.compile(rb'"[^"]{4096,}')

_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "backslashes": MAX_BACKSLASHES,
        "strings": MAX_STRINGS,
        "objects and arrays": MAX_CONTAINERS,
        "keys": MAX_KEYS,
        "commas": MAX_COMMAS,
        "numbers with an exponent or more than 19 digits": MAX_LONG_NUMBERS,
        "bytes in numbers of more than 19 digits": MAX_LONG_NUMBER_BYTES,
    }
)


def check_json_size(text: bytes, field: str = "") -> None:
    """Raises InvalidRequest for a JSON text with too many values."""
    if len(text) <= _SMALL:
        return
    counts = dict.fromkeys(_LIMITS, 0)
    num_syntax = 0
    for piece in _pieces(text):
        counted = piece.translate(None, _NOT_COUNTED)
        backslashes, quotes = counted.count(b"\\"), counted.count(b'"')
        counts["backslashes"] += backslashes
        num_syntax += len(counted) - backslashes - quotes
        # A backslash makes at most one quote part of a string.
        counts["strings"] += (quotes - backslashes) // 2
        _check(counts, field)
    escaped = counts["backslashes"] > 0
    _check_wide(text, escaped, field)
    # Every value except the first follows one of the other characters.
    if num_syntax <= _FEW:
        return
    counts["strings"] = 0
    in_string = False
    for piece in _without_escapes(text) if escaped else _pieces(text):
        in_string = _count(piece, in_string, counts)
        _check(counts, field)
    _check_sum(counts, len(text), field)


def _check_wide(text: bytes, escaped: bool, field: str) -> None:
    if len(text) <= MAX_WIDE_BYTES or (not escaped and text.isascii()) or not _is_wide(text):
        return
    unescaped = text.replace(rb"\"", b"")
    wide = sum(len(found[0]) for found in _LONG_STRING.finditer(unescaped) if _is_wide(found[0]))
    if wide > MAX_WIDE_BYTES:
        found = f"{wide} bytes in long strings with characters above U+FFFF"
        raise InvalidRequest(f"{field or 'the body'} has {found}; at most {MAX_WIDE_BYTES} are allowed", field=field)


def _is_wide(text: bytes) -> bool:
    return any(start in text for start in _WIDE)


def num_values(text: bytes) -> int:
    """Returns the approximate number of values of a JSON text."""
    counts = dict.fromkeys(_LIMITS, 0)
    in_string = False
    for piece in _without_escapes(text):
        in_string = _count(piece, in_string, counts)
    return counts["objects and arrays"] + counts["commas"]


def _pieces(text: bytes) -> Iterator[bytes]:
    return (text[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE))


def _without_escapes(text: bytes) -> Iterator[bytes]:
    """Yields the text in pieces, without escaped backslashes and quotes."""
    begin = 0
    while begin < len(text):
        end = begin + _PIECE
        if text[end - 1 : end] == b"\\":
            found = _BACKSLASHES.match(text, end)
            end = (found.end() if found is not None else end) + 1
        yield text[begin:end].replace(rb"\\", b"").replace(rb"\"", b"")
        begin = end


def _count(piece: bytes, in_string: bool, counts: dict[str, int]) -> bool:
    """Counts a piece's syntax outside of strings. Returns whether the piece ends inside a string."""
    parts = piece.translate(None, _NOT_SYNTAX).split(b'"')
    syntax = b"".join(parts[1::2] if in_string else parts[::2])
    num_quotes = len(parts) - 1
    counts["strings"] += (num_quotes + in_string) // 2
    counts["objects and arrays"] += syntax.count(b"{") + syntax.count(b"[")
    counts["keys"] += syntax.count(b":")
    counts["commas"] += syntax.count(b",")
    exponents = syntax.count(b"e") + syntax.count(b"E") - syntax.count(b"ue") - syntax.count(b"se")
    alike = syntax.translate(_DIGITS_ALIKE)
    long_numbers = _LONG_NUMBER.findall(alike) if b"0" * _LONG_DIGITS in alike else ()
    counts["numbers with an exponent or more than 19 digits"] += exponents + len(long_numbers)
    counts["bytes in numbers of more than 19 digits"] += sum(map(len, long_numbers))
    return in_string != bool(num_quotes % 2)


def _check(counts: Mapping[str, int], field: str) -> None:
    for what, most in _LIMITS.items():
        if counts[what] > most:
            raise InvalidRequest(
                f"{field or 'the body'} has {counts[what]} {what}; at most {most} are allowed", field=field
            )


def _check_sum(counts: Mapping[str, int], num_bytes: int, field: str) -> None:
    parts = {what: counts[what] * each for what, each in zip(_LIMITS, _NANOSECONDS, strict=True)}
    if sum(parts.values()) + num_bytes * _BYTE_NANOSECONDS <= _MAX_NANOSECONDS:
        return
    first, second = sorted(parts, key=lambda what: -parts[what])[:2]
    found = f"{counts[first]} {first} and {counts[second]} {second} in {num_bytes} bytes"
    raise InvalidRequest(f"{field or 'the body'} has {found}; each is allowed, but not both together", field=field)
