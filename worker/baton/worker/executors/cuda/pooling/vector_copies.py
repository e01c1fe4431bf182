"""Copies of vectors to the host, through a ring of pinned buffers, so that the host does not wait for them."""

from __future__ import annotations

import torch
from torch import Tensor


class VectorCopies:
    """A ring of `num_buffers` buffers, more than there are steps in flight. They grow as needed."""

    def __init__(self, num_buffers: int, *, pinned: bool = True) -> None:
        self._buffers = [torch.empty(0) for _ in range(num_buffers)]
        self._turn = 0
        self._pinned = pinned

    def start(self, vectors: Tensor) -> Tensor:
        """Queues the copy of fp32 vectors. Returns its memory, which is used again after `num_buffers` calls."""
        self._turn = (self._turn + 1) % len(self._buffers)
        size = vectors.numel()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.float32, pin_memory=self._pinned)
        return self._buffers[self._turn][:size].view(vectors.shape).copy_(vectors, non_blocking=True)
