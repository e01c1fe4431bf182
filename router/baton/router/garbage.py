"""How often Python looks for reference cycles in a router: seldom, because one look holds up all placements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# gRPC's server leaves five containers in a cycle for each call that is no stream. So many are 4 MB, found every 8,000
# calls by a look that takes 4 ms, remembered placements included.
_MAX_GROWTH = 40_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside the `with` garbage in cycles is looked for only after so many more containers were made than freed."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_GROWTH, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
