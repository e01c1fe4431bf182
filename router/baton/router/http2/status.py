"""gRPC's headers and trailers as a server sends them, and what it reads of a request's. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

import grpc

from baton.rpc.errors import ServiceError, status_of

_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
# Printable ASCII but for the percent sign goes as it is.
_PLAIN = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"


def _string(value: bytes) -> bytes:
    return _integer(len(value)) + value


def _integer(value: int) -> bytes:
    """With a prefix of 7 bits."""
    if value < 127:
        return bytes((value,))
    out, value = bytearray((127,)), value - 127
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def header(name: str, value: str) -> bytes:
    """One HPACK field: literal, not indexed, not Huffman-coded. It leaves no state with the receiver."""
    return b"\x00" + _string(name.encode()) + _string(value.encode("ascii"))


# `:status: 200` is entry 8 of HPACK's static table.
RESPONSE_HEADERS = b"\x88" + header("content-type", "application/grpc")
OK_TRAILERS = header("grpc-status", "0")


def trailers(
    code: grpc.StatusCode, message: str = "", metadata: Iterable[tuple[str, str | bytes]] = (), *, alone: bool = False
) -> bytes:
    """The end of a call. `alone`: nothing was sent before."""
    parts = [RESPONSE_HEADERS if alone else b"", header("grpc-status", str(code.value[0]))]
    if message:
        parts.append(header("grpc-message", quote(message, safe=_PLAIN)))
    for name, value in metadata:
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode().rstrip("=")
        parts.append(header(name, value))
    return b"".join(parts)


def error_trailers(error: ServiceError, *, alone: bool = False) -> bytes:
    """The end of a call that failed, google.rpc.Status included."""
    details = (("grpc-status-details-bin", status_of(error).SerializeToString()),)
    return trailers(error.code, error.message, details, alone=alone)


@lru_cache(maxsize=1024)
def timeout_seconds(value: str) -> float | None:
    """What a grpc-timeout header says. None: no header. ValueError: not one."""
    if not value:
        return None
    digits, unit = value[:-1], value[-1]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_TIMEOUT_DIGITS or unit not in _UNITS:
        raise ValueError(f"grpc-timeout {value!r} is not up to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * _UNITS[unit]
