"""A container's limits count, not its host's size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.worker.executors.host.resources import usable_cores, usable_memory


@pytest.mark.parametrize(
    ("quota", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("1000000000 100000", None)]
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, quota: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_a_memory_limit_limits_the_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    assert usable_memory(tmp_path) == 1048576


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    everything = usable_memory(tmp_path), usable_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (usable_memory(tmp_path), usable_cores(tmp_path)) == everything
    assert everything[0] > 1 << 28
