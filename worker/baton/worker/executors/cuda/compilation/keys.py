"""Keys of compiled kernels that do not depend on the order in which a process hashes functions."""

from __future__ import annotations

from functools import wraps
from typing import Any

from triton.runtime.jit import DependenciesFinder


def hash_callees_first() -> None:
    """Makes all processes compute one key for a kernel. Called before the first kernel; again, it does nothing.

    Triton up to 3.6 includes the constants of a called function only if the function was hashed before its caller, so
    that the engine's process did not find what another process had compiled.
    """
    merge = DependenciesFinder._update_hash
    if hasattr(merge, "__wrapped__"):
        return

    @wraps(merge)
    def merge_hashed(self: DependenciesFinder, function: Any) -> None:
        _ = function.cache_key  # computed by this access
        merge(self, function)

    DependenciesFinder._update_hash = merge_hashed
