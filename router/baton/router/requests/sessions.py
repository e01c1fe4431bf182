"""Each session's last worker and prompt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from baton.router.requests.prompt_sketch import Sketch

_CAPACITY = 50_000
_FORGET_SECONDS = 1800.0
_HASHES = 16  # remembered of each prompt


class LastPlace(NamedTuple):
    """The worker of a session's last request."""

    worker_id: str
    epoch: int
    sketch: Sketch
    at: float


class Sessions:
    """The last place of each session; the oldest go first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._by_session: OrderedDict[str, LastPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_session)

    def find(self, session_id: str, now: float) -> LastPlace | None:
        """Returns the session's last place, or None if there is none or it is too old."""
        place = self._by_session.get(session_id) if session_id else None
        return place if place is not None and now - place.at < _FORGET_SECONDS else None

    def remember(self, session_id: str, worker_id: str, epoch: int, sketch: Sketch, now: float) -> None:
        """Records a placement of the session."""
        if not session_id:
            return
        self._by_session[session_id] = LastPlace(worker_id, epoch, sketch.thinned(_HASHES), now)
        self._by_session.move_to_end(session_id)
        if len(self._by_session) > self._capacity:
            self._by_session.popitem(last=False)
