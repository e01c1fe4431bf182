"""The network between simulated workers: streams of hand-overs, and KV at the speed of their ports."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.services.simulate.virtual.timeline import Clock, Timeline
from baton.v1 import kv_pb2
from baton.worker.link.frames import Kind
from baton.worker.transfer.base import (
    Inbound,
    InboundFenced,
    Landed,
    Outbound,
    Piece,
    Pushed,
    PushFailed,
    PushFenced,
    TransportEvent,
    TransportTotals,
)


class Node(Protocol):
    """A worker as the network sees it."""

    address: str
    alive: bool

    def frame(self, kind: int, channel: int, payload: bytes) -> None:
        """Takes a frame that arrived now."""

    def wake(self) -> None:
        """Called when the transport has events."""


@dataclass(slots=True, eq=False)
class _Stream:
    decode: Node
    decode_channel: int
    prefill: Node
    prefill_channel: int


class Network:
    """The workers by address, and the streams between them. Every message takes `delay` seconds."""

    def __init__(self, timeline: Timeline, delay: float) -> None:
        self.timeline = timeline
        self.transports: dict[str, VirtualTransport] = {}
        self._delay = delay
        self._nodes: dict[str, Node] = {}
        self._streams: dict[tuple[Node, bool, int], _Stream] = {}  # by end: (node, it decodes, its channel)
        self._channels = itertools.count(1)
        self._cut_pairs: set[frozenset[str]] = set()

    def join(self, node: Node) -> None:
        """Makes a worker reachable."""
        self._nodes[node.address] = node

    def send(self, node: Node, now: float, kind: int, channel: int, payload: bytes) -> None:
        """Sends a frame of a worker's hand-over at its own time."""
        self.timeline.at(now + self._delay, lambda: self._deliver(node, kind, channel, payload))

    def leave(self, node: Node) -> None:
        """Ends a dead worker's streams at both ends."""
        self._nodes.pop(node.address, None)
        self.transports.pop(node.address, None)
        for stream in {id(s): s for s in self._streams.values() if node in (s.decode, s.prefill)}.values():
            self._cut(stream)

    def partition(self, one: str, other: str, healed: bool = False) -> None:
        """Cuts or restores the connection between two workers."""
        pair = frozenset((one, other))
        if healed:
            self._cut_pairs.discard(pair)
            return
        self._cut_pairs.add(pair)
        for stream in {id(s): s for s in self._streams.values()}.values():
            if {stream.decode.address, stream.prefill.address} == pair:
                self._cut(stream)

    def reachable(self, one: str, other: str) -> bool:
        """Returns whether bytes pass between two workers."""
        return frozenset((one, other)) not in self._cut_pairs and other in self._nodes

    def _deliver(self, node: Node, kind: int, channel: int, payload: bytes) -> None:
        if not node.alive:
            return
        if kind == Kind.PEER_OPEN:
            self._open(node, channel, payload.decode())
            return
        stream = self._streams.get((node, kind in (Kind.PEER, Kind.PEER_CLOSE), channel))
        if stream is None:
            return
        if kind == Kind.PEER:
            stream.prefill.frame(Kind.PREFILL, stream.prefill_channel, payload)
        elif kind == Kind.PREFILL:
            stream.decode.frame(Kind.PEER, stream.decode_channel, payload)
        elif kind == Kind.PEER_CLOSE:
            self._cut(stream, notify_decode=False)
        elif kind == Kind.PREFILL_CLOSE:
            self._cut(stream, notify_prefill=False)

    def _open(self, node: Node, channel: int, address: str) -> None:
        prefill = self._nodes.get(address)
        if prefill is None or not self.reachable(node.address, address):
            node.frame(Kind.PEER_CLOSE, channel, b"no connection")
            return
        stream = _Stream(node, channel, prefill, next(self._channels))
        self._streams[node, True, channel] = stream
        self._streams[prefill, False, stream.prefill_channel] = stream
        prefill.frame(Kind.PREFILL_OPEN, stream.prefill_channel, b"")

    def _cut(self, stream: _Stream, notify_decode: bool = True, notify_prefill: bool = True) -> None:
        self._streams.pop((stream.decode, True, stream.decode_channel), None)
        self._streams.pop((stream.prefill, False, stream.prefill_channel), None)
        if notify_decode and stream.decode.alive:
            stream.decode.frame(Kind.PEER_CLOSE, stream.decode_channel, b"the stream ended")
        if notify_prefill and stream.prefill.alive:
            stream.prefill.frame(Kind.PREFILL_CLOSE, stream.prefill_channel, b"")


class NetworkLink:
    """A hand-over's link to the network."""

    def __init__(self, network: Network, node: Node, clock: Clock) -> None:
        self._network = network
        self._node = node
        self._clock = clock

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame at the worker's own time."""
        self._network.send(self._node, self._clock.now, kind, channel, payload)

    def post(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """Sends a frame now, also while the worker computes."""
        self._network.send(self._node, self._network.timeline.clock.now, kind, channel, payload)

    def flush(self) -> None:
        """Does nothing: frames do not wait."""


@dataclass(slots=True)
class _Arriving:
    inbound: Inbound
    num_expected: int  # blocks, each layer counted
    num_pushed: int = 0
    num_pieces: int = 0
    ends: list[tuple[float, int]] = field(default_factory=list)  # when this many bytes have landed


@dataclass(slots=True)
class _Push:
    outbound: Outbound
    receiver: VirtualTransport
    ends: float
    num_pieces: int = 0
    num_bytes: int = 0


class VirtualTransport:
    """A worker's port: sends and receives one piece after the other, at a constant speed."""

    fences_locally = True

    def __init__(
        self,
        network: Network,
        node: Node,
        clock: Clock,
        num_layers: int,
        bytes_per_block_layer: int,
        bytes_per_second: float,
    ) -> None:
        self._network = network
        self._node = node
        self._clock = clock
        self._num_layers = num_layers
        self._bytes_per_block_layer = bytes_per_block_layer
        self._bytes_per_second = bytes_per_second
        self._sends_from = self._receives_from = 0.0  # when the port is free again
        self._inbound: dict[int, _Arriving] = {}
        self._pushes: dict[int, _Push] = {}
        self._events: list[TransportEvent] = []
        self._received = TransportTotals()
        self._landing: deque[tuple[float, int, float]] = deque()  # (when, bytes, seconds) of pieces, in order
        network.transports[node.address] = self

    @property
    def addresses(self) -> list[kv_pb2.TransportAddress]:
        """Returns the worker's own address."""
        return [kv_pb2.TransportAddress(kind=kv_pb2.TRANSPORT_KIND_TCP, address=self._node.address)]

    def poll(self) -> list[TransportEvent]:
        """Returns the events since the last call."""
        if not self._events:
            return self._events
        events, self._events = self._events, []
        return events

    def totals(self) -> TransportTotals:
        """Returns the totals received."""
        self._count_landed()
        return self._received

    def totals_by_kind(self) -> dict[str, TransportTotals]:
        """Returns the totals of the only kind."""
        return {"tcp": self.totals()}

    def close(self) -> None:
        """Does nothing."""
        self._inbound.clear()
        self._pushes.clear()

    def open(self, inbound: Inbound) -> None:
        """Expects pieces."""
        self._inbound[inbound.transfer_id] = _Arriving(inbound, len(inbound.block_ids) * self._num_layers)

    def num_landed_bytes(self, transfer_id: int) -> int:
        """Returns the pieces that have arrived."""
        arriving = self._inbound.get(transfer_id)
        return sum(count for ends, count in arriving.ends if ends <= self._clock.now) if arriving is not None else 0

    def fence_inbound(self, transfer_id: int) -> None:
        """Stops writing at once."""
        self._inbound.pop(transfer_id, None)
        self._post(InboundFenced(transfer_id))

    def cut_inbound(self, transfer_id: int) -> None:
        """Does the same as fence_inbound."""
        self.fence_inbound(transfer_id)

    def connect(self, outbound: Outbound) -> None:
        """Begins a push."""
        address = outbound.addresses[0].address
        receiver = self._network.transports.get(address)
        if receiver is None or not self._network.reachable(self._node.address, address):
            self._post(PushFailed(outbound.push_id, "no connection"))
            return
        self._pushes[outbound.push_id] = _Push(outbound, receiver, self._clock.now)

    def push(self, push_id: int, piece: Piece) -> None:
        """Sends a piece after those before it."""
        push = self._pushes.get(push_id)
        if push is None:
            return
        count = piece.num_blocks * piece.num_layers
        num_bytes = count * self._bytes_per_block_layer
        seconds = num_bytes / self._bytes_per_second
        receiver = push.receiver
        ends = max(self._clock.now, self._sends_from, receiver._receives_from) + seconds
        self._sends_from = receiver._receives_from = push.ends = ends
        push.num_pieces += 1
        push.num_bytes += num_bytes
        receiver._expect(push.outbound, count, num_bytes, seconds, ends)

    def finish(self, push_id: int) -> None:
        """Ends a push: Pushed follows when the last piece is sent."""
        push = self._pushes.get(push_id)
        if push is not None:
            pushed = Pushed(push_id, push.num_pieces, push.num_bytes)
            self._network.timeline.at(push.ends, lambda: self._sent(pushed))

    def fence_outbound(self, push_id: int) -> None:
        """Stops sending at once."""
        self._pushes.pop(push_id, None)
        self._post(PushFenced(push_id))

    def cut_outbound(self, push_id: int) -> None:
        """Does the same as fence_outbound."""
        self.fence_outbound(push_id)

    def forget(self, push_id: int) -> None:
        self._pushes.pop(push_id, None)

    def _sent(self, pushed: Pushed) -> None:
        if pushed.push_id in self._pushes:
            self._post(pushed)

    def _expect(self, outbound: Outbound, count: int, num_bytes: int, seconds: float, ends: float) -> None:
        """Takes a piece that will have landed at `ends`."""
        arriving = self._inbound.get(outbound.transfer_id)
        if arriving is None or arriving.inbound.generation != outbound.generation:
            return
        arriving.num_pushed += count
        arriving.num_pieces += 1
        arriving.ends.append((ends, num_bytes))
        self._landing.append((ends, num_bytes, seconds))
        if arriving.num_pushed >= arriving.num_expected:
            self._network.timeline.at(ends, lambda: self._landed(arriving))

    def _count_landed(self) -> None:
        landing, now = self._landing, self._network.timeline.clock.now
        if not landing or landing[0][0] > now:
            return
        totals = self._received
        num_pieces, num_bytes, total = totals.num_received_pieces, totals.num_received_bytes, totals.receive_seconds
        while landing and landing[0][0] <= now:
            _, count, seconds = landing.popleft()
            num_pieces, num_bytes, total = num_pieces + 1, num_bytes + count, total + seconds
        self._received = TransportTotals(
            num_received_pieces=num_pieces, num_received_bytes=num_bytes, receive_seconds=total
        )

    def _landed(self, arriving: _Arriving) -> None:
        transfer_id = arriving.inbound.transfer_id
        if self._inbound.get(transfer_id) is arriving:
            del self._inbound[transfer_id]
            self._post(Landed(transfer_id, arriving.num_pieces, sum(count for _, count in arriving.ends)))

    def _post(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._node.wake()


class VirtualHeartbeat:
    """Renews leases at virtual times; stands in for the hand-over's thread."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._beats: Mapping[object, Callable[[], None]] = {}
        self._interval = 0.25
        self._is_due = False
        self._closed = False

    def alive(self, now: float) -> None:
        """Does nothing: a simulated engine never hangs by itself."""

    def set(self, beats: Mapping[object, Callable[[], None]], interval: float) -> None:
        """Replaces the heartbeats and their interval."""
        self._beats, self._interval = beats, interval
        if beats and not self._is_due:
            self._is_due = True
            self._timeline.after(interval, self._beat)

    def close(self) -> None:
        """Does nothing."""
        self._closed = True

    def _beat(self) -> None:
        self._is_due = False
        if self._closed or not self._beats:
            return
        for beat in list(self._beats.values()):
            beat()
        self._is_due = True
        self._timeline.after(self._interval, self._beat)
