"""Numbers on their way to the device: pinned buffers that rotate, so that the host never waits for a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_BUFFERS = 16  # uploads of all steps that can be in flight, and some


class PinnedRing:
    """Buffers of one type. Pinning memory takes milliseconds: `size` is what an upload usually has at most."""

    def __init__(self, size: int, dtype: torch.dtype, num_buffers: int = _NUM_BUFFERS) -> None:
        self._dtype = dtype
        self._turn = 0
        self._pinned = [torch.empty(size, dtype=dtype, pin_memory=True) for _ in range(num_buffers)]
        self._copied = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]

    def to_device(self, values: NDArray[np.generic], device: torch.device) -> Tensor:
        """A copy there of one-dimensional values."""
        staging = self._stage(values)
        out = staging.to(device, non_blocking=True)
        self._copied[self._turn].record()
        return out

    def copy_to(self, values: NDArray[np.generic], target: Tensor) -> None:
        """Overwrites `target` [len(values)], contiguous, on the device."""
        target.copy_(self._stage(values), non_blocking=True)
        self._copied[self._turn].record()

    def fill_and_copy(self, length: int, fill: Callable[[NDArray[Any]], None], target: Tensor) -> None:
        """Overwrites `target` [length] with what `fill` puts into the staging memory that it is given."""
        staging = self._next(length)
        fill(staging.numpy())
        target.copy_(staging, non_blocking=True)
        self._copied[self._turn].record()

    def _stage(self, values: NDArray[np.generic]) -> Tensor:
        staging = self._next(len(values))
        staging.numpy()[:] = values
        return staging

    def _next(self, length: int) -> Tensor:
        """The next buffer's front, once what it held last is copied."""
        self._turn = turn = (self._turn + 1) % len(self._pinned)
        self._copied[turn].synchronize()
        if len(self._pinned[turn]) < length:
            self._pinned[turn] = torch.empty(2 * length, dtype=self._dtype, pin_memory=True)
        return self._pinned[turn][:length]


class Patches:
    """Changes here and there in one stretch of 32-bit words on the device: one copy up and one launch, however many."""

    def __init__(self, words: Tensor, usual: int) -> None:
        """`words` [num_words] int32; a patch usually has at most `usual` of them."""
        self._words = words
        self._uploads = PinnedRing(usual + _num_longs(usual), torch.int64)

    def write(self, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        """words[places] = values; the places are distinct."""
        count = len(places)
        packed = np.empty(count + _num_longs(count), np.int64)
        packed[:count] = places
        packed[count:].view(np.int32)[:count] = values
        up = self._uploads.to_device(packed, self._words.device)
        self._words.index_copy_(0, up[:count], up[count:].view(torch.int32)[:count])


def _num_longs(num_words: int) -> int:
    return -(-num_words // 2)
