"""A TCP proxy that corrupts, slows, blocks or cuts connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_SLOW_BYTES = 1024  # forwarded at once if the rate is limited


class ByteProxy:
    """Forwards bytes between clients of `address` and the target. Faults may be set while it runs.

    `flips` are positions of bytes to change, counted over all bytes sent to the target.
    """

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.flips: list[int] = []
        self.num_flipped = 0
        self.num_bytes = 0  # sent to the target
        self.bytes_per_second = 0.0  # towards the target; 0: no limit
        self.refusing = False  # connections are closed at once
        self.seen = bytearray()  # forwarded bytes of both directions, if `listens`
        self.listens = False
        self._target = target
        self._open = threading.Event()  # cleared: nothing is forwarded
        self._open.set()
        self._closing = False
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(listen)
        self.host, self.port = self._listener.getsockname()[:2]
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def cut(self) -> None:
        """Closes both ends of all connections."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Drops all bytes without closing connections, like an unplugged cable."""
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def heal(self) -> None:
        """Removes all faults."""
        self.flips, self.bytes_per_second, self.refusing = [], 0.0, False
        self.resume()

    def flip_next(self, offset: int = 0) -> None:
        """Changes the byte `offset` bytes from now."""
        self.flips.append(self.num_bytes + offset)

    def close(self) -> None:
        self._closing = True
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                source, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refusing:
                    raise ConnectionRefusedError
                sink = socket.create_connection(self._target, 2)
            except OSError:
                source.close()
                continue
            sink.settimeout(None)
            for sock in (source, sink):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((source, sink))
            self._start(self._pass, source, sink, True)
            self._start(self._pass, sink, source, False)

    def _pass(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                if self.listens:
                    self.seen += data
                if forward:
                    self._forward(bytearray(data), sink)
                else:
                    sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if forward:
            return
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]
        for sock in (source, sink):
            sock.close()

    def _forward(self, data: bytearray, sink: socket.socket) -> None:
        while data and not self._closing:
            part = data[: _SLOW_BYTES if self.bytes_per_second else len(data)]
            del data[: len(part)]
            if self.bytes_per_second:
                time.sleep(len(part) / self.bytes_per_second)
            self._damage(part)
            sink.sendall(part)

    def _damage(self, part: bytearray) -> None:
        with self._lock:
            start, self.num_bytes = self.num_bytes, self.num_bytes + len(part)
            due = [position for position in self.flips if position < self.num_bytes]
            self.flips = [position for position in self.flips if position >= self.num_bytes]
            for position in due:
                part[max(0, position - start)] ^= 0x10
                self.num_flipped += 1
