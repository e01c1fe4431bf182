"""A CUDA device whose kernels run in Triton's interpreter: the executors' own code over host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _device

from baton.worker.executors.cuda import device_executor, draft_steps, start, whole_executor
from baton.worker.executors.cuda import executor as paged_executor

CPU = torch.device("cpu")
_GIB = 1 << 30


class Event:
    """An event that has passed when it is recorded."""

    def __init__(self, **_: Any) -> None:
        """Takes the options of an event."""

    def record(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing."""

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    """A stream that nothing is queued on."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes the options of a stream."""

    def wait_stream(self, _: Stream) -> None:
        """Does nothing."""


def use_interpreted_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CUDA executors run here. Starts run no warm-up."""
    empty = torch.empty
    _device._device_constructors()  # keeps torch's own `empty` in a cache that outlives this test
    fakes = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_name": lambda *_: "Triton's interpreter",
        "mem_get_info": lambda *_: (70 * _GIB, 80 * _GIB),
        "max_memory_reserved": lambda *_: _GIB,
        "memory_reserved": lambda *_: _GIB,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **how: empty(*sizes, **how))
    for module in (device_executor, start):
        monkeypatch.setattr(module, "open_device", lambda: CPU)
    for module in (paged_executor, whole_executor):
        monkeypatch.setattr(module, "collect_and_compile", lambda *_: 0)
    monkeypatch.setattr(paged_executor.CudaExecutor, "_warm_up", lambda *_: None)
    monkeypatch.setattr(whole_executor.WholeExecutor, "_warm_up", lambda *_: None)
    monkeypatch.setattr(draft_steps.DraftSteps, "_warm_up", lambda *_: None)
