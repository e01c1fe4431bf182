"""Reads uploads (multipart/form-data) that lie in a file, without copying them into memory."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import IO

from baton.rpc.errors import InvalidRequest

_MAX_PARTS = 32
_MAX_HEAD_BYTES = 8 << 10
_MAX_VALUE_BYTES = 4 << 10
_PIECE_BYTES = 1 << 20
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")


@dataclass(frozen=True, slots=True)
class UploadedBytes:
    """The file of an upload: a range of the body."""

    body: IO[bytes]
    filename: str
    begin: int
    size: int

    def pieces(self) -> Iterator[bytes]:
        """Yields the bytes. May run on any thread."""
        self.body.seek(self.begin)
        left = self.size
        while left:
            piece = self.body.read(min(left, _PIECE_BYTES))
            if not piece:
                raise AssertionError("the body of an upload became shorter")
            left -= len(piece)
            yield piece


@dataclass(slots=True)
class Form:
    """A parsed upload."""

    values: dict[str, str] = field(default_factory=dict)
    file: UploadedBytes | None = None


def boundary_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the boundary of a multipart body. Raises InvalidRequest."""
    message = Message()
    message["content-type"] = headers.get(b"content-type", b"").decode("latin-1")
    kind, boundary = message.get_content_type(), message.get_param("boundary")
    if not headers.get(b"content-type") or kind != "multipart/form-data":
        given = headers.get(b"content-type", b"nothing").decode("latin-1").partition(";")[0][:80]
        raise InvalidRequest(
            f"the content type is {given!r}; give multipart/form-data with the parts file and purpose",
            field="content-type",
        )
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequest("the content type multipart/form-data needs a boundary", field="content-type")
    return boundary.encode()


def read_form(body: IO[bytes], boundary: bytes) -> Form:
    """Returns the parts of a body. Blocks: call it on a thread. Raises InvalidRequest."""
    size = body.seek(0, 2)
    if not size:
        raise _malformed("it is empty")
    form = Form()
    with mmap.mmap(body.fileno(), size, access=mmap.ACCESS_READ) as data:
        separator = b"\r\n--" + boundary
        position = 0 if data[: len(separator) - 2] == separator[2:] else _find(data, separator, 0) + 2
        if position < 2 and data[: len(separator) - 2] != separator[2:]:
            raise _malformed("its boundary is missing")
        for _ in range(_MAX_PARTS + 1):
            position += len(separator) - 2
            if data[position : position + 2] == b"--":
                return form
            head_end = data.find(b"\r\n\r\n", position, position + _MAX_HEAD_BYTES)
            if head_end < 0:
                raise _malformed("the headers of a part do not end")
            # A part without content ends with the blank line's own line break.
            end = _find(data, separator, head_end + 2)
            if end < 0:
                raise _malformed("it ends before its last boundary")
            begin = min(head_end + 4, end)
            _add(form, body, data, data[position + 2 : head_end], begin, end)
            position = end + 2
    raise _malformed(f"it has more than {_MAX_PARTS} parts")


def _find(data: mmap.mmap, separator: bytes, begin: int) -> int:
    """Returns the index of the separator from `begin`, or -1. Other threads run between pieces of the data."""
    for first in range(begin, len(data), _PIECE_BYTES):
        found = data.find(separator, first, first + _PIECE_BYTES + len(separator) - 1)
        if found >= 0:
            return found
    return -1


def _add(form: Form, body: IO[bytes], data: mmap.mmap, head: bytes, begin: int, end: int) -> None:
    name, filename = _disposition(head)
    if name == "file":
        if form.file is not None:
            raise InvalidRequest("the upload has several parts named file; give one", field="file")
        form.file = UploadedBytes(body, filename or "file", begin, end - begin)
        return
    if end - begin > _MAX_VALUE_BYTES:
        raise InvalidRequest(f"{name[:80]} has {end - begin} bytes; at most {_MAX_VALUE_BYTES} are allowed", field=name)
    try:
        form.values[name] = data[begin:end].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name[:80]} is not UTF-8", field=name) from error


def _disposition(head: bytes) -> tuple[str, str]:
    """Returns the names of a part and of its file."""
    for line in head.split(b"\r\n"):
        field_name, _, value = line.partition(b":")
        if field_name.strip().lower() == b"content-disposition":
            message = Message()
            message["content-disposition"] = value.decode("utf-8", "replace").strip()
            name = message.get_param("name", header="content-disposition")
            if isinstance(name, str) and name:
                # An extended value may hold lone surrogates, which no JSON can.
                return name, (message.get_filename() or "").encode("utf-8", "replace").decode()
    raise _malformed("a part has no name")


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {why}")
