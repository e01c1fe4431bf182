"""Decodes JSON bodies into typed requests. Problems become InvalidRequest that names the field.

Keys that the request type does not have are listed in a response header, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.gateway.bodies.allowed import allowed_values
from baton.gateway.bodies.json_size import check_json_size
from baton.gateway.bodies.reading import Reading
from baton.gateway.bodies.unknown_fields import UnknownKey, known_keys
from baton.rpc.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)
Neutral = Mapping[str, tuple[bytes, ...]]  # neutral values of fields as JSON; a request type has them as CHANGING

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_COMPARED = 64  # characters of an unknown key: comparing takes time by its length
_MISSING = re.compile(r"missing required field `(\w+)`")
_NOT_ALLOWED = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_MOST_SHOWN = 100  # characters


class Received(Protocol):
    @property
    def pieces(self) -> Sequence[bytes | bytearray]:
        """Returns the body in pieces, because joining a large body takes milliseconds."""

    headers: Mapping[bytes, bytes]  # by lower-case name

    def ignore(self, names: Sequence[str]) -> None:
        """Adds names to the response header of ignored fields."""


class Reader(Protocol):
    """Reads bodies in another process."""

    def read(self, kind: type[msgspec.Struct], strict: bool, pieces: Sequence[bytes | bytearray]) -> Reading | None:
        """Returns the result, or None if the caller must read the body."""


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one request type. `strict` refuses unknown keys. `reader` parses large bodies."""

    def __init__(self, kind: type[T], strict: bool = False, reader: Reader | None = None) -> None:
        self._kind = kind
        self._reader = reader
        self._decoder = msgspec.json.Decoder(kind)
        self._packed = msgspec.msgpack.Decoder(kind)
        self._keys = known_keys(kind)
        self._changing: Neutral = getattr(kind, "CHANGING", {})
        self._strict = strict

    def read(self, received: Received) -> T:
        """Returns the request and records its unknown keys. Raises InvalidRequest."""
        _check_headers(received.headers)
        pieces = received.pieces  # kept here, because a request drops them when it ends
        reading = None if self._reader is None else self._reader.read(self._kind, self._strict, pieces)
        if reading is None:
            request, unknown = self.parse(b"".join(pieces))
        elif reading.problem:
            raise InvalidRequest(reading.problem, field=reading.field)
        else:
            request, unknown = self._packed.decode(reading.request), reading.unknown
        received.ignore(unknown)
        return request

    def decode(self, body: bytes, headers: Mapping[bytes, bytes]) -> T:
        """Returns the request. Raises InvalidRequest."""
        _check_headers(headers)
        return self._decode(body)

    def parse(self, body: bytes) -> tuple[T, list[str]]:
        """Returns the request and its unknown keys. Raises InvalidRequest."""
        request = self._decode(body)
        unknown = self._keys.unknown(body)
        if unknown and self._strict:
            raise _unknown_field(unknown[0])
        for key in unknown:
            _check_changing(key, self._changing)
        return request, [str(key) for key in unknown]

    def _decode(self, body: bytes) -> T:
        check_json_size(body)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise wrong_field(str(error), self._kind) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the body is not valid JSON: {_why(body, error)}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None


def _check_headers(headers: Mapping[bytes, bytes]) -> None:
    _check_content_type(headers.get(b"content-type"))
    _check_content_encoding(headers.get(b"content-encoding", b"identity"))


def _check_content_type(value: bytes | None) -> None:
    kind = (value or b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        shown = kind.decode("latin-1")
        raise InvalidRequest(f"the content type is {shown!r}; give application/json", field="content-type")


def _check_content_encoding(value: bytes) -> None:
    if value.lower() != b"identity":
        shown = value.decode("latin-1")
        raise InvalidRequest(f"the content encoding is {shown!r}; send bodies uncompressed", field="content-encoding")


def _why(body: bytes, error: Exception) -> str:
    if not body:
        return "it is empty"
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8"
    if rb"\ud" in body.lower() and "character" not in str(error):
        return "it ends early, or a string has a lone surrogate"
    return str(error).removeprefix("JSON is malformed: ")


def _check_changing(key: UnknownKey, changing: Neutral) -> None:
    """Raises InvalidRequest for a field of another request that would change the answer if it were honored."""
    if key.place or key.name not in changing or key.value in changing[key.name]:
        return
    message = f"{key.name} is not a field of this request, and ignoring it would change the answer; leave it out"
    raise InvalidRequest(message, field=key.name)


def _unknown_field(key: UnknownKey) -> InvalidRequest:
    close = get_close_matches(key.name[:_COMPARED], sorted(key.known), 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    field = re.sub(r"\[(\d+)\]", r".\1", str(key))[:256]
    return InvalidRequest(f"{field} is not a field of this request{hint}", field=field)


def wrong_field(message: str, kind: type[msgspec.Struct], where: str = "") -> InvalidRequest:
    """Converts msgspec's error about a value of `kind`: "Expected `int`, got `str` - at `$.messages[0].role`".

    `where` is the value's place.
    """
    problem = _PLACE.sub("", message)
    place = _PLACE.search(message)
    found = field = place.group(1) if place else ""
    field = re.sub(r"\[(\d+)\]", r".\1", field).replace("[...]", "").strip(".")
    field = f"{where}.{field}".strip(".")
    if missing := _MISSING.search(problem):
        field = f"{field}.{missing.group(1)}".strip(".")
        return InvalidRequest(f"{field} is required", field=field)
    if (given := _NOT_ALLOWED.fullmatch(problem)) and (allowed := allowed_values(kind, found)):
        shown = given.group(1) if len(given.group(1)) <= _MOST_SHOWN else f"{given.group(1)[:_MOST_SHOWN]}..."
        return InvalidRequest(f"{field} is {shown}; it must be one of {', '.join(allowed)}", field=field)
    problem = problem.replace("`", "")
    problem = problem[:1].lower() + problem[1:]
    return InvalidRequest(f"{field or 'the body'}: {problem}", field=field)
