"""Who speaks for each worker: a stream of this replica, another replica, or nobody. Pure.

Two may claim one worker, when it moved between replicas and one of them has not noticed; the higher term wins,
whichever replica the claims come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Speaker:
    """One stream, or one replica's word on one worker."""

    term: int
    replica: str = ""  # empty: this one

    @property
    def is_own(self) -> bool:
        """Whether the worker publishes, or did last, to this replica."""
        return not self.replica


class Speakers:
    """At most one for each worker."""

    def __init__(self) -> None:
        self._speakers: dict[str, Speaker] = {}
        self._ended: set[str] = set()  # workers whose speaker is known to be gone: any claim is better

    def get(self, worker_id: str) -> Speaker | None:
        """Who speaks for a worker."""
        return self._speakers.get(worker_id)

    def is_own(self, worker_id: str) -> bool:
        """Whether it is a stream of this replica, be it ended."""
        speaker = self._speakers.get(worker_id)
        return speaker is not None and speaker.is_own

    def is_live(self, worker_id: str) -> bool:
        """Whether somebody speaks for the worker now."""
        return worker_id in self._speakers and worker_id not in self._ended

    def term(self, worker_id: str) -> int:
        """Of the stream that speaks for a worker. 0: none does now."""
        speaker = self._speakers.get(worker_id)
        return speaker.term if speaker is not None and self.is_live(worker_id) else 0

    def claim(self, worker_id: str, speaker: Speaker) -> bool:
        """Makes it the worker's speaker. False: there is one with a higher term."""
        if speaker.term < self.term(worker_id):
            return False
        self._speakers[worker_id] = speaker
        self._ended.discard(worker_id)
        return True

    def end(self, worker_id: str) -> None:
        """The speaker is gone; it stays named until another claims the worker."""
        if worker_id in self._speakers:
            self._ended.add(worker_id)

    def forget(self, worker_id: str) -> None:
        """Nobody speaks for the worker."""
        self._speakers.pop(worker_id, None)
        self._ended.discard(worker_id)

    def of_replica(self, replica: str) -> Iterator[str]:
        """The workers that a replica speaks for."""
        return iter([worker_id for worker_id, speaker in self._speakers.items() if speaker.replica == replica])
