"""Copies adapters to the device beside running steps: through pinned memory, on a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_STAGING_BYTES = 4 << 20  # a piece: uploads of running steps wait for at most one
_NUM_STAGINGS = 2


class SlotCopies:
    """Implements baton.worker.adapters.bank.Copy. Any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_STAGINGS)]
        # Blocking, so that the thread sleeps while the device copies.
        self._copied = [torch.cuda.Event(blocking=True) for _ in self._staging]  # type: ignore[no-untyped-call]
        self._turn = 0

    def __call__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies each source to its contiguous target, and waits for that."""
        with self._lock, torch.cuda.stream(self._stream):
            for target, source in pairs:
                self._copy(target.view(-1).view(torch.uint8), source.contiguous().view(-1).view(torch.uint8))
            for copied in self._copied:
                copied.synchronize()

    def _copy(self, target: Tensor, source: Tensor) -> None:
        for start in range(0, len(source), _STAGING_BYTES):
            self._turn = turn = (self._turn + 1) % _NUM_STAGINGS
            self._copied[turn].synchronize()
            piece = source[start : start + _STAGING_BYTES]
            staging = self._staging[turn][: len(piece)].copy_(piece)
            target[start : start + len(piece)].copy_(staging, non_blocking=True)
            self._copied[turn].record()
