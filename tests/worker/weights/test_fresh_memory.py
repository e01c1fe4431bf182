"""Memory that is about to be written has its pages before, and keeps its content."""

from __future__ import annotations

import mmap
import resource
import sys

import pytest
import torch

from baton.worker.weights.stream.fresh_memory import populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages by the range")
PAGES = 512


def faults_of(write: memoryview) -> int:
    """Returns how often this thread waited for a page while it wrote to each."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for start in range(0, len(write), mmap.PAGESIZE):
        write[start] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_writes_to_populated_memory_wait_for_no_page() -> None:
    memory = mmap.mmap(-1, PAGES * mmap.PAGESIZE, mmap.MAP_PRIVATE)
    populate(torch.frombuffer(memory, dtype=torch.float32))
    assert faults_of(memoryview(memory)) < PAGES // 8


def test_content_is_kept_and_views_may_begin_and_end_within_pages() -> None:
    values = torch.arange(1 << 18, dtype=torch.float32)
    for view in (values, values[7:-5], values[:0], values[3], values.view(512, 512).T):
        populate(view)
    assert torch.equal(values, torch.arange(1 << 18, dtype=torch.float32))
