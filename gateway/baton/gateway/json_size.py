"""How many values a JSON text may have: parsing makes an object of each, while everything else waits."""

from __future__ import annotations

from baton.rpc.errors import InvalidRequest

# Outside of strings. Each takes some 30 ms.
MAX_CONTAINERS = 64 << 10  # objects and arrays
MAX_KEYS = 64 << 10
MAX_COMMAS = 512 << 10
MAX_STRINGS = 256 << 10
MAX_BACKSLASHES = 2 << 20  # in strings

_SMALL = 128 << 10
_NOT_COUNTED = bytes(set(range(256)) - set(b'{[:,"\\'))
_NO_SYNTAX_OR_QUOTE = bytes(set(range(256)) - set(b'{[:,"'))


def check_json_size(text: bytes, field: str = "") -> None:
    """Raises InvalidRequest for a JSON text of too many values."""
    if len(text) <= _SMALL:
        return
    counted = text.translate(None, _NOT_COUNTED)
    backslashes, quotes = counted.count(b"\\"), counted.count(b'"')
    if backslashes > MAX_BACKSLASHES:
        raise _too_many(backslashes, "backslashes", MAX_BACKSLASHES, field)
    # Every value but the first has one of the other characters before it.
    if len(counted) - backslashes - quotes <= MAX_CONTAINERS:
        return
    # A backslash makes at most one quote part of its string.
    if (quotes - backslashes) // 2 > MAX_STRINGS:
        raise _too_many((quotes - backslashes) // 2, "strings", MAX_STRINGS, field)
    # What is counted may be in strings, which texts of code are full of.
    if backslashes:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    syntax = text.translate(None, _NO_SYNTAX_OR_QUOTE)
    strings = syntax.count(b'"') // 2
    if strings > MAX_STRINGS:
        raise _too_many(strings, "strings", MAX_STRINGS, field)
    syntax = b"".join(syntax.split(b'"')[::2])
    counts = (
        (syntax.count(b"{") + syntax.count(b"["), "objects and arrays", MAX_CONTAINERS),
        (syntax.count(b":"), "keys", MAX_KEYS),
        (syntax.count(b","), "commas", MAX_COMMAS),
    )
    for count, what, most in counts:
        if count > most:
            raise _too_many(count, what, most, field)


def _too_many(count: int, what: str, most: int, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field or 'The body'} has {count} {what}; at most {most} are allowed.", field=field)
