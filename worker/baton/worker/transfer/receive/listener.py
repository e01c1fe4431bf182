"""Step 1 of receiving: accepts KV connections, one listener for all transports, one thread for each connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Mapping

from baton.worker.executors.base import Executor
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.receive.connection import InboundConnection
from baton.worker.transfer.receive.open_transfers import OpenTransfers
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.connection_limit import retire_longest_idle
from baton.worker.transfer.wire.sockets import listen, shut_down
from baton.worker.transfer.wire.tls import KvTls

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_JOIN_SECONDS = 2.0


class KvListener:
    """Receives pieces of open transfers from senders that present `key`.

    `paths`: by kind, None for tcp; senders of other kinds are refused. `tls` secures every connection; None: no TLS.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        executor: Executor,
        transfers: OpenTransfers,
        paths: Mapping[str, BulkPath | None],
        totals: Totals,
        tls: KvTls | None = None,
    ) -> None:
        self._tls = tls
        self._key = key
        self._executor = executor
        self._transfers = transfers
        self._paths = paths
        self._totals = totals
        self._connections: dict[InboundConnection, threading.Thread] = {}
        self._lock = threading.Lock()  # guards _connections and _closing
        self._closing = False
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        """Open connections, including those whose senders have not closed their end yet."""
        return len(self._connections)

    def close(self) -> None:
        """Ends every connection and thread."""
        with self._lock:
            self._closing = True
            connections = dict(self._connections)
        shut_down(self._listener)
        self._accepting.join(_JOIN_SECONDS)
        self._listener.close()
        for connection in connections:
            connection.cut()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in connections.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("a KV connection could not be accepted: %s", error)
                time.sleep(0.1)  # most likely out of file descriptors
                continue
            self._start(sock, f"{peer[0]}:{peer[1]}")

    def _start(self, sock: socket.socket, peer: str) -> None:
        connection = InboundConnection(
            sock,
            peer,
            self._key,
            self._executor,
            self._transfers,
            self._paths,
            self._totals,
            self._retire_idle,
            self._tls,
        )
        thread = threading.Thread(target=self._run, args=(connection,), name=f"kv-from-{peer}", daemon=True)
        with self._lock:
            refused = self._closing or len(self._connections) >= _MAX_CONNECTIONS
            if not refused:
                self._connections[connection] = thread
        if refused:
            _log.warning("KV connection of %s refused: %d are open", peer, _MAX_CONNECTIONS)
            with contextlib.suppress(OSError):
                sock.close()
            return
        thread.start()

    def _retire_idle(self, kind: str) -> bool:
        with self._lock:
            connections = list(self._connections)
        return retire_longest_idle(kind, connections)

    def _run(self, connection: InboundConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.pop(connection, None)
