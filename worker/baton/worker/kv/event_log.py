"""Numbers the engine's cache changes for the index: hello, batches, snapshots. Owns the sequence; knows no gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from baton.rpc.block_hash import HASH_BYTES
from baton.v1 import index_pb2, kv_pb2
from baton.worker.core import Tier
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.link.frames import Kind

# Changes within this time share a batch.
_BATCH_SECONDS = 0.02
_BLOCKS_PER_SNAPSHOT_PART = 4096
_TIERS = {Tier.DEVICE: kv_pb2.KV_TIER_DEVICE, Tier.HOST: kv_pb2.KV_TIER_HOST}

Send = Callable[[int, int, bytes], None]  # kind, channel, payload


class Cache(Protocol):
    """The operations of an engine that the log uses."""

    @property
    def epoch(self) -> int:
        """The epoch of the contents."""

    def take_events(self) -> Sequence[StoredEvent | RemovedEvent]:
        """Returns the changes since the last call, in order."""

    def cached_by_groups(self, tier: Tier) -> Mapping[tuple[int, ...], bytes]:
        """Returns everything that is findable in a tier now, by the groups that hold it; (): all groups."""


class EventLog:
    """One sequence of all changes, for at most one stream. Only the engine thread uses it."""

    def __init__(self, cache: Cache, worker_id: str, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._worker_id = worker_id
        self._send = send
        self._clock = clock
        self._epoch = cache.epoch
        self._sequence = 0
        self._pending: list[kv_pb2.KvEvent] = []
        self._due: float | None = None
        self._listener: int | None = None

    @property
    def deadline(self) -> float | None:
        """When `collect` must be called at the latest. None: no change is pending."""
        return self._due

    def open(self, channel: int) -> None:
        """Opens a stream to the index, with a hello."""
        self.collect()
        self._close_batch()
        self._listener = channel
        hello = index_pb2.PublishHello(worker_id=self._worker_id, epoch=self._epoch, sequence=self._sequence)
        self._publish(index_pb2.PublishRequest(hello=hello))

    def close(self, channel: int) -> None:
        """Closes the stream. Later changes are in the next stream's sequence or snapshot."""
        if self._listener == channel:
            self._close_batch()
            self._listener = None

    def collect(self) -> None:
        """Collects changes and sends them when they are due.

        Removals are sent at once: routers may place requests where those blocks were.
        """
        if self._cache.epoch != self._epoch:
            self._begin_epoch()
        events = self._cache.take_events()
        if self._listener is None:
            # Without a stream it is enough that the next hello differs from what the index has.
            self._sequence += bool(events)
            return
        self._pending.extend(map(_message_of, events))
        if not self._pending:
            return
        now = self._clock()
        if self._due is None:
            self._due = now + _BATCH_SECONDS
        if now >= self._due or any(isinstance(event, RemovedEvent) or event.groups for event in events):
            self._close_batch()

    def snapshot(self) -> None:
        """Sends everything in parts. The next batch follows its barrier."""
        self.collect()
        self._close_batch()
        self._send_snapshot()

    def _send_snapshot(self) -> None:
        parts = self._snapshot_parts()
        for index, (tier, groups, hashes) in enumerate(parts):
            part = kv_pb2.KvSnapshot(
                worker_id=self._worker_id,
                epoch=self._epoch,
                barrier=self._sequence,
                block_hashes=hashes,
                tier=_TIERS[tier],
                first=index == 0,
                last=index == len(parts) - 1,
                groups=groups,
            )
            self._publish(index_pb2.PublishRequest(snapshot=part))

    def _snapshot_parts(self) -> list[tuple[Tier, tuple[int, ...], bytes]]:
        """Returns at least one part."""
        stride = _BLOCKS_PER_SNAPSHOT_PART * HASH_BYTES
        parts = [
            (tier, groups, hashes[start : start + stride])
            for tier in Tier
            for groups, hashes in self._cache.cached_by_groups(tier).items()
            for start in range(0, len(hashes), stride)
        ]
        return parts or [(Tier.DEVICE, (), b"")]

    def _begin_epoch(self) -> None:
        self._epoch = self._cache.epoch
        self._sequence = 0
        self._pending.clear()
        self._due = None
        # Sent without a request: the index must not offer blocks of the old epoch meanwhile. Events that the snapshot
        # includes may follow it; applying them again ends in the same state.
        self._send_snapshot()

    def _close_batch(self) -> None:
        self._due = None
        if not self._pending:
            return
        self._sequence += 1
        batch = kv_pb2.KvEventBatch(
            worker_id=self._worker_id, epoch=self._epoch, sequence=self._sequence, events=self._pending
        )
        self._publish(index_pb2.PublishRequest(batch=batch))
        self._pending.clear()

    def _publish(self, message: index_pb2.PublishRequest) -> None:
        if self._listener is not None:
            self._send(Kind.PUBLISH, self._listener, message.SerializeToString())


def _message_of(event: StoredEvent | RemovedEvent) -> kv_pb2.KvEvent:
    tier = _TIERS[event.tier]
    if isinstance(event, StoredEvent):
        stored = kv_pb2.BlocksStored(block_hashes=event.block_hashes, tier=tier, groups=event.groups)
        return kv_pb2.KvEvent(stored=stored)
    return kv_pb2.KvEvent(removed=kv_pb2.BlocksRemoved(block_hashes=event.block_hashes, tier=tier))
