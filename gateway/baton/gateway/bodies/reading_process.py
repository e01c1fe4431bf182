"""The process that parses large bodies, because parsing blocks an interpreter for milliseconds.

`python -m baton.gateway.bodies.reading_process FD` serves one body after another on the socket FD, until the gateway
closes its end.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache

from msgspec import Struct, msgpack

from baton.gateway.bodies.decoder import BodyDecoder
from baton.gateway.bodies.reading import Reading, Task
from baton.gateway.helpers.frames import receive_frame, send_value
from baton.gateway.helpers.helper_process import serving_gateway
from baton.gateway.memory import LARGE_BYTES, trim_memory
from baton.rpc.errors import InvalidRequest


def main(argv: list[str]) -> int:
    """Parses bodies until the gateway ends. Returns an exit code."""
    with serving_gateway(argv) as (sock, ready):
        ready()
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
        return Reading(memoryview(msgpack.encode(request)), unknown)
    except InvalidRequest as error:
        return Reading(problem=error.message, field=error.field)
    except (OverflowError, RecursionError):
        return Reading(representable=False)


@cache
def _decoder_of(task: Task) -> BodyDecoder[Struct]:
    return BodyDecoder(getattr(importlib.import_module(task.module), task.name), task.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
