"""Streams to prefill workers: opened on demand, closed when idle. Knows nothing of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from baton.v1 import kv_pb2, types_pb2, worker_pb2
from baton.worker.handover.decode.backoff import PeerBackoff
from baton.worker.handover.decode.remote_prefill import PrefillPeer
from baton.worker.handover.settings import HandoverSettings
from baton.worker.kv_spec import KvSpec
from baton.worker.transfer.conversion.blocks import worker_conversion
from baton.worker.transfer.layout import spec_of

Message = worker_pb2.PrefillStreamRequest


class PrefillPeers:
    """All open streams. `open_peer` dials an address, `send` queues a message."""

    def __init__(
        self,
        hello: kv_pb2.PeerHello,
        kv_spec: KvSpec,
        settings: HandoverSettings,
        open_peer: Callable[[int, str], None],
        send: Callable[[int, Message], None],
        close_peer: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.backoff = PeerBackoff()
        self._hello = hello
        self.kv_spec = kv_spec
        self._settings = settings
        self._open_peer = open_peer
        self._send = send
        self._close_peer = close_peer
        self._clock = clock
        self._channels = itertools.count(1)
        self._peers: dict[int, PrefillPeer] = {}
        self._peer_at: dict[str, PrefillPeer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[PrefillPeer]:
        return iter(list(self._peers.values()))

    def at(self, channel: int) -> PrefillPeer | None:
        """Returns the peer of a stream. None: the stream was closed."""
        return self._peers.get(channel)

    def find(self, endpoint: types_pb2.Endpoint) -> PrefillPeer | None:
        """Returns a stream to this worker. None: it is this worker itself, or in backoff."""
        now = self._clock()
        if endpoint.worker_id == self._hello.worker_id or not endpoint.address:
            return None
        if not self.backoff.allows(endpoint.address, endpoint.epoch, now):
            return None
        peer = self._peer_at.get(endpoint.address)
        if peer is None:
            peer = PrefillPeer(next(self._channels), endpoint, now, self._settings.connect_seconds, now)
            self._peers[peer.channel] = self._peer_at[endpoint.address] = peer
            self._open_peer(peer.channel, endpoint.address)
            self.send(peer, Message(hello=self._hello))
        return peer

    def send(self, peer: PrefillPeer, message: Message) -> None:
        """Queues a message, unless the stream is closed."""
        if peer.open:
            self._send(peer.channel, message)

    def greeted(self, peer: PrefillPeer, hello: kv_pb2.PeerHello) -> None:
        """Handles the peer's hello. Raises Mismatch if its KV cannot be converted to this worker's layout."""
        worker_conversion(spec_of(hello.layout), self.kv_spec)  # the peer converts
        peer.greeted = True
        peer.epoch = hello.epoch
        peer.silence_seconds = self._settings.silence_seconds

    def mismatched(self, peer: PrefillPeer) -> None:
        """Puts a peer with an incompatible layout in backoff."""
        self.backoff.mismatched(peer.endpoint.address, peer.endpoint.epoch, self._clock())

    def close_all(self) -> None:
        """Closes every stream. None has a prefill."""
        for peer in self:
            self._forget(peer.channel)
            self.close(peer)

    def close(self, peer: PrefillPeer) -> None:
        """Closes a stream from this end."""
        self._close_peer(peer.channel)

    def closed(self, channel: int) -> PrefillPeer | None:
        """Handles the end of a stream, or a failed dial. None: it was handled before."""
        peer = self._forget(channel)
        if peer is not None:
            self.backoff.failed(peer.endpoint.address, peer.endpoint.epoch, self._clock())
        return peer

    def tick(self, now: float, deaf_seconds: float) -> list[PrefillPeer]:
        """Closes idle streams. Returns the peers that were silent for too long."""
        silent: list[PrefillPeer] = []
        for peer in self:
            peer.last_message_at = min(now, peer.last_message_at + deaf_seconds)
            if peer.prefills:
                if now >= peer.last_message_at + peer.silence_seconds:
                    silent.append(peer)
            elif now >= peer.idle_since + self._settings.idle_seconds:
                self._forget(peer.channel)
                self.close(peer)
        return silent

    def _forget(self, channel: int) -> PrefillPeer | None:
        peer = self._peers.pop(channel, None)
        if peer is not None:
            peer.open = False
            del self._peer_at[peer.endpoint.address]
        return peer
