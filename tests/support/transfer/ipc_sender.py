"""A sender over IPC for a separate process, which tests stop and kill."""

from __future__ import annotations

import os
import signal

from support.transfer.transport_ends import SOURCE, End, HostKv, filled, paths_of, piece_of, wait_until

from baton.worker.transfer.base import Outbound
from baton.worker.transfer.routes import address_of


class IpcSender:
    """A sender that has pushed one layer of the source blocks as transfer 1."""

    def __init__(self, port: int, key: bytes) -> None:
        executor = filled(HostKv(), seed=5)
        self._end = End(executor, paths_of("ipc", executor))
        identity = self._end.transport.addresses[0].address.partition("/")[2]
        address = address_of("ipc", 0, "127.0.0.1", port, identity, key)
        self._end.transport.connect(Outbound(1, [address], 1, 7, 0xFEED, True))
        self._end.transport.push(1, piece_of(0, 0, SOURCE))
        wait_until(lambda: self._end.transport.totals_by_kind()["ipc"].num_sent_pieces == 1, 30)
        ((_, link),) = self._end.transport._pushes.values()
        self._connection = link._connection

    def spoil(self) -> None:
        """Sends bytes that are not a header."""
        self._connection._sock.sendall(b"x" * 200)

    def stop(self) -> None:
        """Stops the process. When it is resumed, overwrites all of its slots."""
        os.kill(os.getpid(), signal.SIGSTOP)
        memory = self._connection._sender._memory
        if memory is not None:  # None: closed in the meantime, so nothing can be written
            memory[:] = 0xEE

    def close_transport(self) -> None:
        self._end.transport.close()
