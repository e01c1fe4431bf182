"""One key for a kernel, whatever was hashed before it: Triton 3.6's way of merging constants, put back here."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.jit import DependenciesFinder, JITFunction  # noqa: E402

from baton.worker.executors.cuda.compilation.keys import hash_callees_first  # noqa: E402

SCALE = tl.constexpr(3)
scaled: Any = None  # each key has its own


def _scaled(x):  # type: ignore[no-untyped-def]
    return x * SCALE


def _kernel(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, scaled(tl.load(x_ptr)))


def _merge_early(self: DependenciesFinder, function: Any) -> None:
    """Takes the constants that are known before the function is hashed, as Triton 3.6 does."""
    self.used_global_vals.update(function.used_global_vals)
    self.hasher.update(function.cache_key.encode())


def _key(monkeypatch: pytest.MonkeyPatch, *, callee_first: bool) -> str:
    callee = JITFunction(_scaled)
    monkeypatch.setitem(globals(), "scaled", callee)
    if callee_first:
        assert callee.cache_key
    return str(JITFunction(_kernel).cache_key)


def test_a_kernels_key_is_one_whatever_was_hashed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DependenciesFinder, "_update_hash", _merge_early)
    assert _key(monkeypatch, callee_first=False) != _key(monkeypatch, callee_first=True)
    hash_callees_first()
    assert _key(monkeypatch, callee_first=False) == _key(monkeypatch, callee_first=True)


def test_callees_are_hashed_first_by_one_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DependenciesFinder, "_update_hash", _merge_early)
    hash_callees_first()
    once = DependenciesFinder._update_hash
    hash_callees_first()
    assert DependenciesFinder._update_hash is once
