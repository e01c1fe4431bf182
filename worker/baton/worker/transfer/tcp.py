"""The TCP transport: pieces over plain sockets, for machines without better and for tests. Knows nothing of leases."""

from __future__ import annotations

from collections.abc import Callable

from baton.rpc.errors import InvalidRequest, Mismatch
from baton.v1 import kv_pb2
from baton.worker.executor.base import Executor
from baton.worker.transfer.base import Inbound, Outbound, Piece, PushFenced, TransportEvent, TransportTotals
from baton.worker.transfer.event_queue import EventQueue
from baton.worker.transfer.tcp_receiver import TcpReceiver
from baton.worker.transfer.tcp_sender import Push, SenderLink


class TcpTransport:
    """A Transport. Receives on a listener of its own, sends over one connection a receiver.

    `wake` is called from any thread when `poll` has something; `advertised_host` is what peers dial.
    """

    fences_locally = True  # what is received is written by threads of our own

    def __init__(
        self, executor: Executor, host: str, port: int, advertised_host: str, wake: Callable[[], None]
    ) -> None:
        layout = executor.layout
        self._executor = executor
        self._events = EventQueue(wake)
        self._receiver = TcpReceiver(
            host, port, layout.num_layers, layout.bytes_per_block_layer, executor.write_blocks, self._events
        )
        self._advertised_host = advertised_host
        self._tp_rank = layout.tp_rank
        self._links: dict[tuple[str, int], SenderLink] = {}
        self._pushes: dict[int, tuple[Push, SenderLink]] = {}
        self._num_ended_pieces = 0  # of links that are gone
        self._num_ended_bytes = 0

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        """Where this worker takes KV."""
        address = f"{self._advertised_host}:{self._receiver.port}"
        return [kv_pb2.TransportAddress(kind=kv_pb2.TRANSPORT_KIND_TCP, tp_rank=self._tp_rank, address=address)]

    def poll(self) -> list[TransportEvent]:
        """What happened since the last call."""
        return self._events.take()

    def totals(self) -> TransportTotals:
        """As of now."""
        received = self._receiver.totals
        with received.lock:
            return TransportTotals(
                num_received_pieces=received.num_pieces,
                num_received_bytes=received.num_bytes,
                receive_seconds=received.seconds,
                num_stray_pieces=received.num_stray_pieces,
                num_corrupt_pieces=received.num_corrupt_pieces,
                num_bad_connections=received.num_bad_connections,
                num_sent_pieces=self._num_ended_pieces + sum(link.num_pieces for link in self._links.values()),
                num_sent_bytes=self._num_ended_bytes + sum(link.num_bytes for link in self._links.values()),
            )

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        """As of now."""
        return {"tcp": self.totals()}

    def close(self) -> None:
        """Ends every connection and thread. Idempotent."""
        links = list(self._links.values())
        for link in links:
            link.close()
        self._receiver.close()
        for link in links:
            link.join()

    def open(self, inbound: Inbound) -> None:
        """Writes this transfer's pieces from now on."""
        self._receiver.open(inbound)

    def num_landed_bytes(self, transfer_id: int) -> int:
        """How much of an open transfer has arrived."""
        return self._receiver.num_landed_bytes(transfer_id)

    def fence_inbound(self, transfer_id: int) -> None:
        """Stops writes; waits for none."""
        self._receiver.fence(transfer_id)

    def cut_inbound(self, transfer_id: int) -> None:
        """Nothing to do: a write that was begun is a copy in memory, and ends by itself."""

    def connect(self, outbound: Outbound) -> None:
        """Begins a push."""
        ours = (address.address for address in outbound.addresses if address.kind == kv_pb2.TRANSPORT_KIND_TCP)
        known = next(ours, None)
        if known is None:
            raise Mismatch("the transfer names no transport that this worker has", field="transfer.transports")
        address = _split(known)
        push = Push(outbound)
        link = self._links.get(address)
        if link is None or not link.begin(push):
            self._drop_ended()
            link = self._links[address] = SenderLink(*address, self._executor.read_blocks, self._events)
            link.begin(push)
        self._pushes[outbound.push_id] = push, link

    def push(self, push_id: int, piece: Piece) -> None:
        """Queues one piece."""
        if entry := self._pushes.get(push_id):
            push, link = entry
            link.send(push, piece.layer, piece.first_index, piece.block_ids)

    def finish(self, push_id: int) -> None:
        """That was the last piece."""
        if entry := self._pushes.get(push_id):
            push, link = entry
            link.end(push)

    def fence_outbound(self, push_id: int) -> None:
        """Drops what waits, and lets a piece that is being sent go out."""
        if entry := self._pushes.get(push_id):
            push, link = entry
            link.fence(push)
        else:
            self._events.post(PushFenced(push_id))

    def cut_outbound(self, push_id: int) -> None:
        """Cuts the connection that the push uses."""
        if entry := self._pushes.get(push_id):
            entry[1].cut()

    def forget(self, push_id: int) -> None:
        """The owner is done with this push."""
        self._pushes.pop(push_id, None)

    def _drop_ended(self) -> None:
        for address, link in list(self._links.items()):
            if link.ended:
                self._num_ended_pieces += link.num_pieces
                self._num_ended_bytes += link.num_bytes
                del self._links[address]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"transport address {address!r} is not host:port", field="transfer.transports")
    return host.strip("[]"), int(port)
