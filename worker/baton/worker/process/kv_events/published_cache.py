"""The engine's cache as the index reads it, whose changes are published over ZeroMQ too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from baton.worker.core import BlockHash, Tier
from baton.worker.kv.block_origins import BlockOrigin
from baton.worker.kv.cache_events import RemovedEvent, StoredEvent
from baton.worker.kv.event_log import Cache
from baton.worker.process.kv_events.messages import EventForm


class CacheWithOrigins(Cache, Protocol):
    """An engine that knows the origins of stored blocks."""

    def take_origins(self) -> Mapping[BlockHash, BlockOrigin]:
        """Returns the origins of blocks stored since the last call."""


class PublishedCache:
    """Implements Cache. Each take of changes is a batch."""

    def __init__(
        self,
        cache: CacheWithOrigins,
        form: EventForm,
        publish: Callable[[Any], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._form = form
        self._publish = publish
        self._clock = clock
        self._seen_epoch = cache.epoch

    @property
    def epoch(self) -> int:
        """The epoch of the cache."""
        return self._cache.epoch

    def take_events(self) -> Sequence[StoredEvent | RemovedEvent]:
        """Publishes and returns the changes since the last call, in order."""
        changes = self._cache.take_events()
        origins = self._cache.take_origins()
        events = list(self._form.events(changes, origins))
        if self._cache.epoch != self._seen_epoch:
            self._seen_epoch = self._cache.epoch
            events.insert(0, self._form.cleared())
        if events:
            self._publish(self._form.batch(self._clock(), events))
        return changes

    def cached_by_groups(self, tier: Tier) -> Mapping[tuple[int, ...], bytes]:
        """Returns everything that is findable in a tier now."""
        return self._cache.cached_by_groups(tier)
