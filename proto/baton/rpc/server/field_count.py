"""Counts the fields of a serialized message before it is parsed.

Parsing holds the interpreter's lock: 16 MB of empty messages take 0.3 s and 460 MB. Counting holds it only for moments.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 1 << 17  # of one request, in all its messages: a documented limit
UNCOUNTED_BYTES = 1 << 16  # of a request that is parsed as it is: it has few

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class TooManyFields(Exception):
    """A message has more fields than are counted."""


def check_fields(data: bytes, message: Descriptor, most: int = MAX_FIELDS) -> None:
    """Raises TooManyFields for a message of more than `most` fields. Ignores data that cannot be parsed."""
    waiting = [(0, len(data), message)]
    count = 0
    while waiting:
        at, end, kind = waiting.pop()
        fields = kind.fields_by_number
        while at < end:
            count += 1
            if count > most:
                raise TooManyFields
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _BYTES:
                size, at = _varint(data, at)
                field = fields.get(tag >> 3)
                if size and field is not None and field.message_type is not None:
                    waiting.append((at, min(at + size, end), field.message_type))
                at += size
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number and where it ends; what is cut ends with the data."""
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return number, at
