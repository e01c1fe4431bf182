"""Python's garbage collection in a router: small collections often, because a full one delays all placements.

gRPC's server leaves five containers in a cycle for each unary call. Kept decisions have twenty each, none in a cycle,
and as many are dropped as are added. With its default thresholds Python collects rarely, and then traverses all of
them, for 20 ms and more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_CALLS = 64  # between two looks at what is new: 0.2 ms each
_NEW = 10_000  # containers, those freed again taken off: where they come from anything else
# Looks at what is new before one at what is older, for 20 ms: the containers of calls that were under way during each
# wait for that. 300,000 calls leave 5 MB.
_LOOKS = 5000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Excludes existing objects from collection. Inside the `with`, rarely collects older generations."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW, _LOOKS, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class CallGarbage:
    """Looks at what is new after every few calls that are no streams."""

    def __init__(self) -> None:
        self._num_calls = 0

    def called(self) -> None:
        """Counts a collection."""
        self._num_calls += 1
        if self._num_calls >= _CALLS:
            self._num_calls = 0
            gc.collect(0)
