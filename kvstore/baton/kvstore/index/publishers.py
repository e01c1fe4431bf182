"""The source of each worker's events: a stream of this replica, another replica, or none. Pure.

After a worker moved between replicas, both may claim it until the old one notices. The claim with the higher term
wins on every replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Publisher:
    """A stream that publishes one worker, or a replica that has one."""

    term: int
    replica: str = ""  # empty: this one

    @property
    def is_own(self) -> bool:
        """Whether the worker publishes to this replica, or did last."""
        return not self.replica


class Publishers:
    """At most one publisher per worker."""

    def __init__(self) -> None:
        self._publishers: dict[str, Publisher] = {}
        self._ended: set[str] = set()  # workers whose publisher is gone: any claim wins

    def get(self, worker_id: str) -> Publisher | None:
        """Returns the worker's publisher, ended or not."""
        return self._publishers.get(worker_id)

    def is_own(self, worker_id: str) -> bool:
        """Returns whether the publisher is a stream of this replica, ended or not."""
        publisher = self._publishers.get(worker_id)
        return publisher is not None and publisher.is_own

    def is_live(self, worker_id: str) -> bool:
        """Returns whether the worker has a publisher that has not ended."""
        return worker_id in self._publishers and worker_id not in self._ended

    def term(self, worker_id: str) -> int:
        """Returns the term of the worker's publisher, or 0 if it has none."""
        publisher = self._publishers.get(worker_id)
        return publisher.term if publisher is not None and self.is_live(worker_id) else 0

    def claim(self, worker_id: str, publisher: Publisher) -> bool:
        """Makes `publisher` the worker's publisher. Returns False if the present one has a higher term."""
        if publisher.term < self.term(worker_id):
            return False
        self._publishers[worker_id] = publisher
        self._ended.discard(worker_id)
        return True

    def end(self, worker_id: str) -> None:
        """Marks the publisher as gone. It stays recorded until another claims the worker."""
        if worker_id in self._publishers:
            self._ended.add(worker_id)

    def forget(self, worker_id: str) -> None:
        """Removes the worker's publisher."""
        self._publishers.pop(worker_id, None)
        self._ended.discard(worker_id)

    def of_replica(self, replica: str) -> Iterator[str]:
        """Returns the workers that a replica publishes."""
        return iter([worker_id for worker_id, publisher in self._publishers.items() if publisher.replica == replica])
