"""The age of a view: seconds since its source last proved that the view is current."""

from __future__ import annotations

import time
from collections.abc import Callable


class Freshness:
    """Starts at the age of 0, so that a source which never answers shows a growing age."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._proved_at = clock()

    def prove(self) -> None:
        """Records that the view is current now."""
        self._proved_at = self._clock()

    @property
    def age_seconds(self) -> float:
        """Returns the seconds since the last confirmation."""
        return self._clock() - self._proved_at
