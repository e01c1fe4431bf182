"""Uploads to the device through a ring of pinned buffers, so that the host does not wait for copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_BUFFERS = 16  # more than the uploads of all steps in flight


class PinnedRing:
    """A ring of buffers of one dtype. `size` should be the usual maximum, because pinning memory takes milliseconds."""

    def __init__(self, size: int, dtype: torch.dtype, num_buffers: int = _NUM_BUFFERS) -> None:
        self._dtype = dtype
        self._current = 0
        self._pinned = [torch.empty(size, dtype=dtype, pin_memory=True) for _ in range(num_buffers)]
        self._copied = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]

    def to_device(self, values: NDArray[np.generic], device: torch.device) -> Tensor:
        """Returns a copy of one-dimensional values on the device."""
        staging = self._stage(values)
        out = staging.to(device, non_blocking=True)
        self._copied[self._current].record()
        return out

    def copy_to(self, values: NDArray[np.generic], target: Tensor) -> None:
        """Copies values to the contiguous `target` [len(values)] on the device."""
        target.copy_(self._stage(values), non_blocking=True)
        self._copied[self._current].record()

    def fill_and_copy(self, length: int, fill: Callable[[NDArray[Any]], None], target: Tensor) -> None:
        """Copies to `target` [length] the values that `fill` writes to the staging memory."""
        staging = self._next(length)
        fill(staging.numpy())
        target.copy_(staging, non_blocking=True)
        self._copied[self._current].record()

    def _stage(self, values: NDArray[np.generic]) -> Tensor:
        staging = self._next(len(values))
        staging.numpy()[:] = values
        return staging

    def _next(self, length: int) -> Tensor:
        """Returns the first `length` elements of the next buffer, after waiting for its last copy."""
        self._current = current = (self._current + 1) % len(self._pinned)
        self._copied[current].synchronize()
        if len(self._pinned[current]) < length:
            self._pinned[current] = torch.empty(2 * length, dtype=self._dtype, pin_memory=True)
        return self._pinned[current][:length]


class Patches:
    """Scattered writes to 32-bit words on the device, with one upload and one launch for any number of them."""

    def __init__(self, words: Tensor, usual: int) -> None:
        """`words` are [num_words] int32; a write usually has at most `usual` of them."""
        self._words = words
        self._uploads = PinnedRing(usual + _num_longs(usual), torch.int64)

    def write(self, indices: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """Computes words[indices] = values. Indices are distinct."""
        count = len(indices)
        packed = np.empty(count + _num_longs(count), np.int64)
        packed[:count] = indices
        packed[count:].view(np.int32)[:count] = values
        up = self._uploads.to_device(packed, self._words.device)
        self._words.index_copy_(0, up[:count], up[count:].view(torch.int32)[:count])


def _num_longs(num_words: int) -> int:
    return -(-num_words // 2)
