"""How often Python looks for reference cycles in a router: next to never, because one look holds up all placements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# More containers than remembered placements bring at once; only what leaks in cycles grows beyond. A look at so many
# takes a tenth of a second.
_MAX_GROWTH = 300_000


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
