"""All transports of a worker: one listener, and for each receiver the best kind that both ends have.

Knows nothing of leases. This worker's own threads write the pool, whichever transport moves the bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from baton.v1 import kv_pb2
from baton.worker.executors.base import Executor
from baton.worker.transfer.base import Inbound, Outbound, Piece, PushFenced, TransportEvent, TransportTotals
from baton.worker.transfer.bulk import BulkPath
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.host_identity import host_identity
from baton.worker.transfer.receive.listener import KvListener
from baton.worker.transfer.receive.open_transfers import OpenTransfers
from baton.worker.transfer.routes import Route, address_of, routes_to
from baton.worker.transfer.send.connection import OutboundConnection, Push
from baton.worker.transfer.send.dialer import Dialer
from baton.worker.transfer.totals import Totals
from baton.worker.transfer.wire.connection_limit import retire_longest_idle
from baton.worker.transfer.wire.frames import KEY_BYTES
from baton.worker.transfer.wire.tls import KvTls


class Transports:
    """A Transport. `paths`: this worker's kinds, best first; None for tcp, which needs no bulk path. Owns the paths.

    `wake` is called from any thread when `poll` has events. Peers dial `advertised_host`. `tls` secures every
    connection: the bytes under tcp, the headers and credits under other kinds. Raises Unavailable if it cannot listen.
    """

    fences_locally = True

    def __init__(
        self,
        executor: Executor,
        host: str,
        port: int,
        advertised_host: str,
        wake: Callable[[], None],
        paths: Mapping[str, BulkPath | None] | None = None,
        epoch: int = 0,
        max_piece_bytes: int = 0,
        identity: str | None = None,
        tls: KvTls | None = None,
    ) -> None:
        self._paths = {"tcp": None} if paths is None else dict(paths)
        self._identity = host_identity() if identity is None else identity
        self._advertised_host = advertised_host
        self._tp_rank = executor.kv_spec.tp_rank
        self._events = EventQueue(wake)
        self._totals = Totals(self._paths)
        self._transfers = OpenTransfers(executor.kv_spec, self._events)
        self._dialer = Dialer(executor, self._paths, epoch, max_piece_bytes, self._totals, self._retire_idle, tls)
        self._connections: dict[tuple[Route, ...], OutboundConnection] = {}
        self._pushes: dict[int, tuple[Push, OutboundConnection]] = {}
        self._key = secrets.token_bytes(KEY_BYTES)
        self._receiver = KvListener(host, port, self._key, executor, self._transfers, self._paths, self._totals, tls)

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        host, port = self._advertised_host, self._receiver.port
        return [address_of(name, self._tp_rank, host, port, self._identity, self._key) for name in self._paths]

    @property
    def num_connections(self) -> int:
        """Connections of senders, including those whose slots wait for their sender's end."""
        return self._receiver.num_connections

    def poll(self) -> list[TransportEvent]:
        return self._events.take()

    def totals(self) -> TransportTotals:
        return self._totals.all()

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        return self._totals.by_kind()

    def close(self) -> None:
        connections = list(self._connections.values())
        for connection in connections:
            connection.close()
        self._receiver.close()
        for connection in connections:
            connection.join()
        for path in self._paths.values():
            if path is not None:
                path.close()

    def open(self, inbound: Inbound) -> None:
        self._transfers.open(inbound)

    def num_landed_bytes(self, transfer_id: int) -> int:
        return self._transfers.num_landed_bytes(transfer_id)

    def fence_inbound(self, transfer_id: int) -> None:
        """Stops writes. Does not wait for writers."""
        self._transfers.fence(transfer_id)

    def cut_inbound(self, transfer_id: int) -> None:
        """Does nothing: a write that has begun is a copy within this host, and ends by itself."""

    def connect(self, outbound: Outbound) -> None:
        routes = routes_to(outbound.addresses, self._paths, self._identity)
        push = Push(outbound)
        connection = self._connections.get(routes)
        if connection is None or not connection.begin(push):
            self._connections = {known: other for known, other in self._connections.items() if not other.ended}
            connection = self._connections[routes] = self._new_connection(routes)
            connection.begin(push)
        self._pushes[outbound.push_id] = push, connection

    def push(self, push_id: int, piece: Piece) -> None:
        if entry := self._pushes.get(push_id):
            push, connection = entry
            connection.send(push, piece)

    def finish(self, push_id: int) -> None:
        if entry := self._pushes.get(push_id):
            push, connection = entry
            connection.end(push)

    def fence_outbound(self, push_id: int) -> None:
        if entry := self._pushes.get(push_id):
            push, connection = entry
            connection.fence(push)
        else:
            self._events.post(PushFenced(push_id))

    def cut_outbound(self, push_id: int) -> None:
        """Cuts the connection of the push."""
        if entry := self._pushes.get(push_id):
            entry[1].cut()

    def forget(self, push_id: int) -> None:
        self._pushes.pop(push_id, None)

    def _retire_idle(self, kind: str) -> bool:
        """Retires the longest idle connection of a kind. Runs on a connection's thread."""
        return retire_longest_idle(kind, list(self._connections.values()))

    def _new_connection(self, routes: tuple[Route, ...]) -> OutboundConnection:
        name = f"{routes[0].host}:{routes[0].port}"
        return OutboundConnection(
            name, lambda changed, dialed: self._dialer.open(routes, changed, dialed), self._events
        )
