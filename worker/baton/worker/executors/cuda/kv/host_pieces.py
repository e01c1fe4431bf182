"""Copies one layer of blocks between the KV pool of a CUDA device and host memory, for transfers over the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.kv_spec import KvSpec


class HostPieces:
    """Copies on a separate stream, beside steps. Thread-safe, as KvCopies."""

    def __init__(self, kv: KvCopies, spec: KvSpec, device: torch.device) -> None:
        self._kv = kv
        self._spec = spec
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(self, layer: int, block_ids: Sequence[BlockId]) -> memoryview:
        """Copies one layer of these blocks to the host."""
        num_bytes = len(block_ids) * self._spec.layer_bytes(layer)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._kv.gather(range(layer, layer + 1), block_ids, staged)
            host.copy_(staged, non_blocking=True)
            self._stream.record_event().synchronize()
        return memoryview(cast(bytearray, host.numpy()))

    def write(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer of these blocks from the host, and waits for that. Accepts only all heads."""
        if heads is not None:
            raise InvalidRequest("a piece has a part of the heads; this worker holds all of them", field="heads")
        expected = len(block_ids) * self._spec.layer_bytes(layer)
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for {len(block_ids)} blocks; it must be {expected}", field="data"
            )
        host = torch.empty(expected, dtype=torch.uint8, pin_memory=True)
        host.numpy()[:] = np.frombuffer(data, np.uint8)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._kv.scatter(range(layer, layer + 1), block_ids, host.to(self._device, non_blocking=True))
            self._stream.record_event().synchronize()
