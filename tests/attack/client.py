"""Sends one case, as its delivery asks, and reads the answer to its first token."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attack.cases.case import Case, Delivery

_TOKEN = re.compile(
    rb'"(?:content|reasoning_content|reasoning|thinking|text|delta|arguments|partial_json)": ?"[^"]'
    rb'|"tool_calls": ?\[\{|"token_ids": ?\[\d|\[DONE\]|message_stop'
)
_SLOW_PIECES = 8
_SLOW_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int  # 0: the connection ended, or nothing came in time
    headers: dict[str, str]
    seconds: float  # to the status line
    text: bytes = b""  # its begin

    @property
    def accepted(self) -> bool:
        """Returns whether the request was served."""
        return 200 <= self.status < 300


def send(port: int, key: str, case: Case, seconds: float, at_token: Callable[[], None] = lambda: None) -> Answer:
    """Returns the answer to a case; a streamed one is left at its first token, where `at_token` is called."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=seconds)
    began = time.monotonic()
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):  # refused while it is still sent: the answer says so
            for piece in _pieces(case, key):
                connection.sendall(piece)
            if case.delivery is Delivery.HALF_CLOSED:
                connection.shutdown(socket.SHUT_WR)
        return _read(connection, case, began, seconds, at_token)
    finally:
        connection.close()


def _pieces(case: Case, key: str) -> Iterator[bytes]:
    fixed = (("host", "127.0.0.1"), ("authorization", f"Bearer {key}"), ("content-type", "application/json"))
    head = f"POST {case.path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (*fixed, *case.headers))
    if case.delivery is Delivery.CHUNKED:
        yield head.encode() + b"transfer-encoding: chunked\r\n\r\n"
        yield b"".join(b"1\r\n%c\r\n" % byte for byte in case.body) + b"0\r\n\r\n"
        return
    yield head.encode() + b"content-length: %d\r\n\r\n" % len(case.body)
    if case.delivery is not Delivery.SLOW:
        yield case.body
        return
    step = len(case.body) // _SLOW_PIECES + 1
    for start in range(0, len(case.body), step):
        time.sleep(_SLOW_SECONDS)
        yield case.body[start : start + step]


def _read(connection: socket.socket, case: Case, began: float, seconds: float, at_token: Callable[[], None]) -> Answer:
    data = b""
    status, headers, took = 0, {}, seconds
    deadline = began + seconds
    with contextlib.suppress(ConnectionError, TimeoutError):
        while time.monotonic() < deadline:
            piece = connection.recv(1 << 20)
            if not piece:
                break
            data = data[-200_000:] + piece  # a token's event may lie across two pieces
            if not status and b"\r\n\r\n" in data:
                took = time.monotonic() - began
                head, _, data = data.partition(b"\r\n\r\n")
                status, headers = _parse(head)
            if 0 < status < 400 and case.streamed and _TOKEN.search(data):
                at_token()
                break
            if status and (status >= 400 or _is_complete(headers, data, case)):
                break
    return Answer(status, headers, took, data[:300])


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


def _is_complete(headers: dict[str, str], data: bytes, case: Case) -> bool:
    length = headers.get("content-length")
    if length is not None:
        return len(data) >= min(int(length), 200_000)
    return data.endswith(b"0\r\n\r\n")
