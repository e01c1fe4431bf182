"""The KV pool of a CUDA device, as transfers see it: blocks between the pool and one contiguous piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.blocks import gather_blocks, scatter_blocks
from baton.worker.core import BlockId


class KvCopies:
    """Gathers and scatters on the caller's current stream. Thread-safe: every call stands alone.

    `pool` gives [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim].
    """

    def __init__(self, pool: Callable[[], Tensor]) -> None:
        self._pool = pool

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self._pool().device

    def num_bytes(self, num_layers: int, num_blocks: int) -> int:
        """Of so many blocks of so many layers."""
        pool = self._pool()
        return num_layers * num_blocks * pool[0, 0].numel() * pool.element_size()

    @torch.inference_mode()
    def gather(self, layers: range, block_ids: Sequence[BlockId], out: Tensor) -> Tensor:
        """Queues the copy of these blocks into `out` [num_bytes] uint8.

        Returns them as [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], in the same memory.
        """
        pool = self._pool()[layers.start : layers.stop]
        values = _shaped(out, pool, len(block_ids))
        gather_blocks(pool, self._index(block_ids), out=values)
        return values

    @torch.inference_mode()
    def scatter(self, layers: range, block_ids: Sequence[BlockId], values: Tensor) -> None:
        """Queues the copy of `values` [num_bytes] uint8 into these blocks, which are distinct."""
        pool = self._pool()[layers.start : layers.stop]
        scatter_blocks(pool, self._index(block_ids), _shaped(values, pool, len(block_ids)))

    def warm_up(self) -> None:
        """Compiles both kernels, on a block that nobody holds yet."""
        values = torch.empty(self.num_bytes(1, 1), dtype=torch.uint8, device=self.device)
        self.gather(range(1), [BlockId(0)], values)
        self.scatter(range(1), [BlockId(0)], values)
        torch.cuda.current_stream(self.device).synchronize()

    def _index(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.from_numpy(np.asarray(block_ids, np.int32)).to(self.device, non_blocking=True)


def _shaped(memory: Tensor, pool: Tensor, num_blocks: int) -> Tensor:
    return memory.view(pool.dtype).view(num_blocks, pool.shape[0], *pool.shape[2:])
