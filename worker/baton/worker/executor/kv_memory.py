"""The KV blocks' memory in the host: one tensor for the model, the same bytes for transfers. Knows no requests."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId
from baton.worker.executor.base import KvLayout


class KvMemory:
    """Zeroed pages that cost nothing until they are written. One block more than asked for: the null block.

    Padded block tables name the null block, so that what other requests computed, be it infinite, is never read.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, dtype: torch.dtype) -> None:
        self.null_block = num_blocks
        self._num_blocks = num_blocks
        self._block_bytes = layout.bytes_per_block_layer
        shape = (layout.num_layers, num_blocks + 1, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        memory = _reserve(layout.bytes_per_block * (num_blocks + 1), num_blocks)
        self.tensor: Tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        self._bytes = np.frombuffer(memory, dtype=np.uint8).reshape(
            layout.num_layers, num_blocks + 1, self._block_bytes
        )

    def read(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray:
        """A copy of one layer of these blocks."""
        blocks = self._check(layer, block_ids)
        data = bytearray(len(blocks) * self._block_bytes)
        np.take(
            self._bytes[layer], blocks, axis=0, out=np.frombuffer(data, np.uint8).reshape(len(blocks), -1), mode="clip"
        )
        return data

    def write(self, layer: int, block_ids: Sequence[BlockId], data: memoryview) -> None:
        """Copies one layer of these blocks in."""
        blocks = self._check(layer, block_ids)
        expected = len(blocks) * self._block_bytes
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for layer {layer} of {len(blocks)} blocks; it must be {expected}", field="data"
            )
        if expected:
            self._bytes[layer, blocks] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)

    def _check(self, layer: int, block_ids: Sequence[BlockId]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        blocks = np.fromiter(block_ids, np.int64, len(block_ids))
        num_layers = self._bytes.shape[0]
        if not 0 <= layer < num_layers:
            raise InvalidRequest(f"layer {layer} does not exist: allowed are 0 to {num_layers - 1}", field="layer")
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            wrong = blocks[(blocks < 0) | (blocks >= self._num_blocks)][0]
            raise InvalidRequest(
                f"block {wrong} does not exist: allowed are 0 to {self._num_blocks - 1}", field="block_ids"
            )
        return blocks


def _reserve(num_bytes: int, num_blocks: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidRequest(
            f"{num_blocks} KV blocks need {num_bytes} bytes, which this machine does not give ({error}): "
            "lower kv_cache_memory or num_blocks",
            field="kv_cache_memory",
        ) from error
