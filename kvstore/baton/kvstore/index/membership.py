"""Who speaks for each worker, and for how long without a word: ties speakers, leases and the index together."""

from __future__ import annotations

import logging

from baton.kvstore.index.index import Index
from baton.kvstore.index.leases import Leases
from baton.kvstore.index.speakers import Speaker, Speakers
from baton.kvstore.metrics import KvstoreMetrics

_log = logging.getLogger(__name__)


class Membership:
    """The lease of each worker that publishes here, or that nobody speaks for.

    A worker whose lease ends is silent: readers keep its entries and do not count them. It counts again as soon as it
    is heard and nothing is missing; after the retention it is forgotten.
    """

    def __init__(
        self,
        index: Index,
        speakers: Speakers,
        lease_seconds: float,
        retention_seconds: float,
        metrics: KvstoreMetrics,
    ) -> None:
        self._index = index
        self._speakers = speakers
        self._metrics = metrics
        self._leases = Leases(lease_seconds, retention_seconds, self._on_silent, self._on_expired)

    def speaker(self, worker_id: str) -> Speaker | None:
        """Who speaks for a worker."""
        return self._speakers.get(worker_id)

    def claim(self, worker_id: str, speaker: Speaker) -> bool:
        """A stream or a replica speaks for the worker from now on. False: another one's term is higher."""
        if not self._speakers.claim(worker_id, speaker):
            return False
        if not speaker.is_own:
            self._leases.end(worker_id)  # the replica watches over it
        return True

    def renew(self, worker_id: str, is_caught_up: bool, is_new: bool = False) -> None:
        """The worker was heard on a stream of this replica."""
        self._leases.renew(worker_id)
        known = self._index.get(worker_id)
        if known is not None and is_caught_up and (known.is_silent or is_new):
            self._index.hear(worker_id)

    def end(self, worker_id: str) -> None:
        """The worker's stream is gone: what is left of its lease runs."""
        self._speakers.end(worker_id)

    def watch_restored(self, worker_id: str) -> None:
        """The worker came from the store; nobody has confirmed it yet."""
        self._leases.begin_silent(worker_id)

    def lose_replica(self, replica: str, is_hung: bool) -> None:
        """A replica is not heard any more. Its workers have their lease's time to publish elsewhere, unless the
        replica hung: then nobody knows since when nothing was heard of them."""
        for worker_id in self._speakers.of_replica(replica):
            self._speakers.end(worker_id)
            known = self._index.get(worker_id)
            if known is None:
                self._speakers.forget(worker_id)
            elif is_hung or known.is_silent:
                self._index.silence(worker_id)
                self._leases.begin_silent(worker_id)
            else:
                self._leases.renew(worker_id)

    def close(self) -> None:
        """Ends every lease."""
        self._leases.close()

    def _on_silent(self, worker_id: str) -> None:
        if self._index.silence(worker_id):
            self._metrics.expired_leases.inc()
            _log.warning("worker %s was not heard of for its lease; its blocks do not count", worker_id)

    def _on_expired(self, worker_id: str) -> None:
        if self._index.forget(worker_id):
            _log.warning("worker %s stayed away; its blocks are forgotten", worker_id)
        if not self._speakers.is_live(worker_id):
            self._speakers.forget(worker_id)
