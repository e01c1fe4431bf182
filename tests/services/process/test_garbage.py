"""What a measured run changes in Python's garbage collection. In a process of its own: pytest's heap is frozen."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc
from baton.services.process.garbage import frozen_heap

if {frozen}:
    gc.freeze()
with frozen_heap():
    print(gc.get_freeze_count() > 0)
print(gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_a_heap_is_as_frozen_after_a_run_as_before(frozen: bool) -> None:
    words = [sys.executable, "-c", PROGRAM.format(frozen=frozen)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(frozen)]
