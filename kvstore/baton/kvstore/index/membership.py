"""The workers' membership: connects their publishers and leases with the index."""

from __future__ import annotations

import logging

from baton.kvstore.counters import KvstoreCounters
from baton.kvstore.index.index import Index
from baton.kvstore.index.leases import Leases
from baton.kvstore.index.publishers import Publisher, Publishers

_log = logging.getLogger(__name__)


class Membership:
    """The lease of each worker that publishes to this replica or to none.

    A worker whose lease ends is silent: readers keep its entries but ignore them. They count again as soon as the
    worker sends a message and none of its events is missing. After the retention the worker is forgotten.
    """

    def __init__(
        self,
        index: Index,
        publishers: Publishers,
        lease_seconds: float,
        retention_seconds: float,
        counters: KvstoreCounters,
    ) -> None:
        self._index = index
        self._publishers = publishers
        self._counters = counters
        self._leases = Leases(lease_seconds, retention_seconds, self._on_silent, self._on_expired)

    def publisher(self, worker_id: str) -> Publisher | None:
        """Returns the worker's publisher."""
        return self._publishers.get(worker_id)

    def claim(self, worker_id: str, publisher: Publisher) -> bool:
        """Makes `publisher` the worker's publisher. Returns False if the present one has a higher term."""
        if not self._publishers.claim(worker_id, publisher):
            return False
        if not publisher.is_own:
            self._leases.end(worker_id)  # the replica keeps its lease
        return True

    def renew(self, worker_id: str, is_caught_up: bool, is_new: bool = False) -> None:
        """Renews the lease of a worker that sent a message to this replica."""
        self._leases.renew(worker_id)
        known = self._index.get(worker_id)
        if known is not None and is_caught_up and (known.is_silent or is_new):
            self._index.mark_heard(worker_id)

    def end(self, worker_id: str) -> None:
        """Marks the worker's stream as ended. The rest of its lease continues."""
        self._publishers.end(worker_id)

    def watch_restored(self, worker_id: str) -> None:
        """Starts the retention of a worker that was loaded from the store and has not confirmed its entries."""
        self._leases.begin_silent(worker_id)

    def lose_replica(self, replica: str, is_hung: bool) -> None:
        """Takes over the leases of a lost replica's workers, so that they have time to publish elsewhere.

        If the replica hung, the time of their last messages is unknown, so they are silent at once.
        """
        for worker_id in self._publishers.of_replica(replica):
            self._publishers.end(worker_id)
            known = self._index.get(worker_id)
            if known is None:
                self._publishers.forget(worker_id)
            elif is_hung or known.is_silent:
                self._index.mark_silent(worker_id)
                self._leases.begin_silent(worker_id)
            else:
                self._leases.renew(worker_id)

    def close(self) -> None:
        """Drops all leases."""
        self._leases.close()

    def _on_silent(self, worker_id: str) -> None:
        if self._index.mark_silent(worker_id):
            self._counters.expired_leases.inc()
            _log.warning("worker %s sent nothing for its lease; its blocks are ignored", worker_id)

    def _on_expired(self, worker_id: str) -> None:
        if self._index.forget(worker_id):
            _log.warning("worker %s did not return within the retention; its blocks are dropped", worker_id)
        if not self._publishers.is_live(worker_id):
            self._publishers.forget(worker_id)
