"""An HTTP/1.1 server that responds with 200 to all requests and records them."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Recorder:
    """The requests, in order."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)

    def paths(self) -> list[str]:
        """The paths of all requests, without queries."""
        return [head.split(b" ")[1].decode("latin-1").partition("?")[0] for head in self.heads]

    def values(self, name: str, index: int = -1) -> list[str]:
        """Returns all values of a header in one request."""
        rows = (line.partition(b":") for line in self.heads[index].split(b"\r\n")[1:])
        return [value.strip().decode("latin-1") for key, _, value in rows if key.lower().decode("latin-1") == name]

    def names(self, index: int = -1) -> set[str]:
        """Returns the header names of one request."""
        return {line.partition(b":")[0].lower().decode("latin-1") for line in self.heads[index].split(b"\r\n")[1:]}


@contextmanager
def recording() -> Iterator[Recorder]:
    """Runs the server within a `with` statement."""
    recorder = Recorder()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self._head():
                recorder.heads.append(head)
                self._skip_body(head.lower())
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        def _head(self) -> bytes:
            lines = []
            while (line := self.rfile.readline()) not in (b"", b"\r\n"):
                lines.append(line.rstrip(b"\r\n"))
            return b"\r\n".join(lines)

        def _skip_body(self, head: bytes) -> None:
            for line in head.split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    self.rfile.read(int(line.partition(b":")[2]))
                elif line.startswith(b"transfer-encoding:"):
                    while size := int(self.rfile.readline(), 16):
                        self.rfile.read(size + 2)
                    self.rfile.readline()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        recorder.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()
