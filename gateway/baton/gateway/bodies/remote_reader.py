"""Parses large bodies in a separate process. Knows no routes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, msgpack

from baton.gateway.bodies.reading import Reading, Task
from baton.gateway.helpers.frames import receive_frame, send_frame, send_value
from baton.gateway.helpers.helper_process import HelperProcess

REMOTE_BYTES = 64 << 10  # parsing less blocks the interpreter for a fraction of a millisecond
_MODULE = "baton.gateway.bodies.reading_process"
_ANSWER_SECONDS = 10


class RemoteReader:
    """Reads large bodies in a helper process. `read` is for one thread."""

    def __init__(self) -> None:
        self.process = HelperProcess(_MODULE, "reads large bodies", _ANSWER_SECONDS)

    def read(self, kind: type[Struct], strict: bool, pieces: Sequence[bytes | bytearray]) -> Reading | None:
        """Returns the process's result, or None if the caller must parse the body. Never waits for the process's start.

        Leaves bodies of up to REMOTE_BYTES to the caller.
        """
        if sum(map(len, pieces)) <= REMOTE_BYTES:
            return None
        sock = self.process.connection()
        if sock is None:
            return None
        try:
            send_value(sock, Task(kind.__module__, kind.__qualname__, strict))
            send_frame(sock, *pieces)
            reading = msgpack.decode(receive_frame(sock), type=Reading)
        except (OSError, EOFError) as error:
            self.process.failed(error)
            return None
        return reading if reading.representable else None

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self.process.close()
