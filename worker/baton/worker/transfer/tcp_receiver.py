"""The receiving end of the TCP transport: a listener, and a thread for each connection that writes pieces into blocks.

Bytes of a transfer that is not open, or that do not carry its generation and epoch, are drained and never written.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence

from baton.rpc.errors import DataLoss, Unavailable
from baton.worker.core import BlockId
from baton.worker.transfer.base import Inbound, InboundFailed, InboundFenced, Landed
from baton.worker.transfer.coverage import Coverage
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.tcp_frames import HEADER_BYTES, PieceHeader, decode_header
from baton.worker.transfer.tcp_options import enlarge_receive_buffer

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_BODY_SECONDS = 30  # without a byte of a piece that has begun
_IDLE_PERIODS = 20  # of _BODY_SECONDS without a piece, until a connection is closed
_JOIN_SECONDS = 2.0

WriteBlocks = Callable[[int, Sequence[BlockId], memoryview], None]


class _OpenTransfer:
    """One inbound transfer, shared by the engine thread and whoever writes."""

    def __init__(self, inbound: Inbound, num_layers: int) -> None:
        self.inbound = inbound
        self.coverage = Coverage(num_layers, len(inbound.block_ids))
        self.num_bytes = 0
        self.num_writers = 0
        self.closed = False
        self.fencing = False  # someone waits for the last writer
        self.lock = threading.Lock()


class _Connection:
    """A peer's connection and its thread."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.transfer_ids: set[int] = set()  # of transfers that had a piece on it
        self.staging = bytearray(1 << 20)

    def cut(self) -> None:
        """Wakes its thread, for the last time."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class ReceiveTotals:
    """What came in; guarded by `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_pieces = 0
        self.num_bytes = 0
        self.seconds = 0.0
        self.num_stray_pieces = 0
        self.num_corrupt_pieces = 0
        self.num_bad_connections = 0


class TcpReceiver:
    """Takes pieces for open transfers."""

    def __init__(
        self, host: str, port: int, num_layers: int, bytes_per_block_layer: int, write: WriteBlocks, events: EventQueue
    ) -> None:
        self.totals = ReceiveTotals()
        self._num_layers = num_layers
        self._bytes_per_block_layer = bytes_per_block_layer
        self._write = write
        self._events = events
        self._open: dict[int, _OpenTransfer] = {}
        self._connections: dict[_Connection, threading.Thread] = {}
        self._lock = threading.Lock()  # of the two above
        self._closing = False
        self._listener = _listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    def open(self, inbound: Inbound) -> None:
        """Writes this transfer's pieces from now on."""
        with self._lock:
            self._open[inbound.transfer_id] = _OpenTransfer(inbound, self._num_layers)

    def num_landed_bytes(self, transfer_id: int) -> int:
        """0 for a transfer that is not open."""
        transfer = self._open.get(transfer_id)
        return transfer.num_bytes if transfer is not None else 0

    def fence(self, transfer_id: int) -> None:
        """InboundFenced follows: at once, or when the piece that is being written is."""
        transfer = self._forget(transfer_id)
        if transfer is None:
            self._events.post(InboundFenced(transfer_id))
            return
        with transfer.lock:
            transfer.closed = transfer.fencing = True
            done = transfer.num_writers == 0
        if done:
            self._events.post(InboundFenced(transfer_id))

    def close(self) -> None:
        """Ends every connection and thread."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_JOIN_SECONDS)
        self._listener.close()
        for connection in connections:
            connection.cut()
        for thread in connections.values():
            thread.join(_JOIN_SECONDS)

    # Connections.

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("a KV connection could not be accepted: %s", error)
                time.sleep(0.1)  # out of descriptors, most likely
                continue
            self._start(sock, f"{peer[0]}:{peer[1]}")

    def _start(self, sock: socket.socket, peer: str) -> None:
        connection = _Connection(sock, peer)
        thread = threading.Thread(target=self._run, args=(connection,), name=f"kv-from-{peer}", daemon=True)
        with self._lock:
            refused = self._closing or len(self._connections) >= _MAX_CONNECTIONS
            if not refused:
                self._connections[connection] = thread
        if refused:
            _log.warning("KV connection of %s refused: %d are open", peer, _MAX_CONNECTIONS)
            sock.close()
            return
        thread.start()

    def _run(self, connection: _Connection) -> None:
        reason = "the connection ended"
        try:
            sock = connection.sock
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _BODY_SECONDS, 0))
            while (header := self._receive_header(connection)) is not None:
                self._receive_piece(connection, header)
        except DataLoss as error:
            reason = error.message
            with self.totals.lock:
                self.totals.num_bad_connections += 1
            _log.warning("KV connection of %s dropped: %s", connection.peer, reason)
        except OSError as error:
            reason = f"the connection broke: {error}"
        except Exception as error:  # of the executor: the thread must not die in silence
            reason = f"pieces could not be written: {error}"
            _log.exception("KV connection of %s failed", connection.peer)
        finally:
            connection.sock.close()
            with self._lock:
                self._connections.pop(connection, None)
            for transfer_id in connection.transfer_ids:
                self._fail(transfer_id, f"{connection.peer}: {reason}")

    def _receive_header(self, connection: _Connection) -> PieceHeader | None:
        """None: the peer ended the connection between two pieces, or was idle for long."""
        data = bytearray(HEADER_BYTES)
        view = memoryview(data)
        num_idle = 0
        while view:
            try:
                count = connection.sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                num_idle += 1
                if len(view) < HEADER_BYTES:
                    raise DataLoss("a piece's header did not come to its end") from None
                if num_idle >= _IDLE_PERIODS:
                    return None
                continue
            if count == 0:
                if len(view) < HEADER_BYTES:
                    raise ConnectionError("it ended within a header")
                return None
            view = view[count:]
        return decode_header(data)

    # Pieces.

    def _receive_piece(self, connection: _Connection, header: PieceHeader) -> None:
        began = time.monotonic()
        body = self._receive_body(connection, header.num_bytes)
        seconds = time.monotonic() - began
        transfer = self._transfer_of(header)
        if transfer is None:
            self._count_stray()
            return
        connection.transfer_ids.add(header.transfer_id)
        if problem := self._problem(transfer.inbound, header, body):
            self._fail(header.transfer_id, f"{connection.peer}: {problem}", corrupt=problem.startswith("checksum"))
            return
        self._write_piece(transfer, header, body, seconds)

    def _receive_body(self, connection: _Connection, num_bytes: int) -> memoryview:
        if len(connection.staging) < num_bytes:
            connection.staging = bytearray(num_bytes)
        body = memoryview(connection.staging)[:num_bytes]
        view = body
        while view:
            count = connection.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("it ended within a piece")
            view = view[count:]
        return body

    def _transfer_of(self, header: PieceHeader) -> _OpenTransfer | None:
        transfer = self._open.get(header.transfer_id)
        if transfer is None:
            return None
        inbound = transfer.inbound
        known = header.generation == inbound.generation and header.receiver_epoch == inbound.receiver_epoch
        return transfer if known else None

    def _problem(self, inbound: Inbound, header: PieceHeader, body: memoryview) -> str:
        expected = header.num_blocks * self._bytes_per_block_layer
        if header.num_bytes != expected:
            return f"a piece of {header.num_blocks} blocks has {header.num_bytes} bytes, expected {expected}"
        if header.checksum is None:
            return "checksums were asked for, a piece came without" if inbound.checksum else ""
        if header.checksum != zlib.crc32(body):
            with self.totals.lock:
                self.totals.num_corrupt_pieces += 1
            return f"checksum of layer {header.layer}, block {header.first_index} does not match"
        return ""

    def _write_piece(self, transfer: _OpenTransfer, header: PieceHeader, body: memoryview, seconds: float) -> None:
        first, count = header.first_index, header.num_blocks
        with transfer.lock:
            if transfer.closed:
                self._count_stray()
                return
            try:
                transfer.coverage.claim(header.layer, first, count)
            except DataLoss as error:
                problem = error.message
            else:
                problem = ""
                transfer.num_writers += 1
        if problem:
            self._fail(header.transfer_id, problem)
            return
        try:
            self._write(header.layer, transfer.inbound.block_ids[first : first + count], body)
        except Exception as error:
            self._leave(transfer, 0, 0)
            self._fail(header.transfer_id, f"a piece could not be written: {error}")
            _log.exception("a piece of KV could not be written")
            return
        with self.totals.lock:
            self.totals.num_pieces += 1
            self.totals.num_bytes += len(body)
            self.totals.seconds += seconds
        self._leave(transfer, count, len(body))

    def _leave(self, transfer: _OpenTransfer, num_blocks: int, num_bytes: int) -> None:
        """A writer is done; the last one tells whoever waits for that."""
        transfer_id = transfer.inbound.transfer_id
        with transfer.lock:
            transfer.num_writers -= 1
            if num_blocks:
                transfer.coverage.land(num_blocks)
                transfer.num_bytes += num_bytes
            landed = transfer.coverage.complete and not transfer.closed
            transfer.closed = transfer.closed or landed
            fenced = transfer.fencing and transfer.num_writers == 0
        if landed:
            self._forget(transfer_id)
            self._events.post(Landed(transfer_id, transfer.coverage.num_pieces, transfer.num_bytes))
        elif fenced:
            self._events.post(InboundFenced(transfer_id))

    def _fail(self, transfer_id: int, reason: str, corrupt: bool = False) -> None:
        """Tells of an open transfer's end, once. Writes stop; whoever writes now is waited for by the fence."""
        transfer = self._open.get(transfer_id)
        if transfer is None:
            return
        with transfer.lock:
            if transfer.closed:
                return
            transfer.closed = True
        self._events.post(InboundFailed(transfer_id, reason, corrupt))

    def _forget(self, transfer_id: int) -> _OpenTransfer | None:
        with self._lock:
            return self._open.pop(transfer_id, None)

    def _count_stray(self) -> None:
        with self.totals.lock:
            self.totals.num_stray_pieces += 1


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        enlarge_receive_buffer(listener)
        listener.bind((bare, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on transfer_listen={host}:{port}: {error.strerror or error}") from error
    return listener
