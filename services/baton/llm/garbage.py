"""Python's garbage collection while many requests are submitted: each makes some sixty containers, none in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW = 20_000  # containers, those freed again taken off, before what is new is looked at; Python's default is 700


@contextmanager
def rare_collections() -> Iterator[None]:
    """Looks for garbage more rarely inside the `with`, unless the process already does."""
    before = gc.get_threshold()
    if not 0 < before[0] < _NEW:
        yield
        return
    gc.set_threshold(_NEW, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
