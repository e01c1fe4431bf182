"""The process that parses large bodies, because parsing blocks an interpreter for milliseconds.

`python -m baton.gateway.bodies.reading_process FD` serves one body after another on the socket FD, until the gateway
closes its end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from functools import cache

from msgspec import Struct, msgpack

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.reading import Reading, Task, receive_frame, send_value
from baton.gateway.memory import LARGE_BYTES, return_large_blocks, trim_memory
from baton.rpc.errors import InvalidRequest

_NICE = 5  # lower priority than the gateway's event loop


def main(argv: list[str]) -> int:
    """Parses bodies until the gateway ends. Returns an exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    return_large_blocks()
    with socket.socket(fileno=int(argv[0])) as sock, contextlib.suppress(EOFError, ConnectionError):
        sock.sendall(b"r")
        while True:
            task = msgpack.decode(receive_frame(sock), type=Task)
            body = bytes(receive_frame(sock))
            send_value(sock, read_body(_decoder_of(task), body))
            if len(body) > LARGE_BYTES:
                del body
                trim_memory()
    return 0


def read_body(decoder: BodyDecoder[Struct], body: bytes) -> Reading:
    """Returns the parsed request of a body, or its problem."""
    try:
        request, unknown = decoder.parse(body)
        return Reading(msgpack.encode(request), unknown)
    except InvalidRequest as error:
        return Reading(problem=error.message, field=error.field)
    except (OverflowError, RecursionError):
        return Reading(representable=False)


@cache
def _decoder_of(task: Task) -> BodyDecoder[Struct]:
    return BodyDecoder(getattr(importlib.import_module(task.module), task.name), task.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
