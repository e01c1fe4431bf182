"""Copies one layer of blocks between the KV pool of a CUDA device and host memory, for transfers over the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from baton.rpc.errors import DataLoss, InvalidRequest
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
        num_bytes = self._num_bytes(layer, block_ids)
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            if self._kv.holds_states(layer):
                staged = self._kv.read_states(range(layer, layer + 1), block_ids)
            else:
                staged = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self._kv.gather(range(layer, layer + 1), block_ids, staged)
            host.copy_(staged, non_blocking=True)
            self._stream.record_event().synchronize()
        return memoryview(cast(bytearray, host.numpy()))

    def write(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer of these blocks from the host, and waits for that. Accepts only all heads.

        Raises DataLoss for a state with NaN.
        """
        has_states = self._kv.holds_states(layer)
        if heads is not None and not (has_states and heads == (0, 1)):
            raise InvalidRequest("a piece has a part of the heads; this worker holds all of them", field="heads")
        expected = self._num_bytes(layer, block_ids)
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for {len(block_ids)} blocks; it must be {expected}", field="data"
            )
        if has_states and bool(np.isnan(np.frombuffer(data, np.float32)).any()):
            raise DataLoss(f"the state of KV layer {layer} that another worker sent holds NaN")
        host = torch.empty(expected, dtype=torch.uint8, pin_memory=True)
        host.numpy()[:] = np.frombuffer(data, np.uint8)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            copy = self._kv.write_states if has_states else self._kv.scatter
            copy(range(layer, layer + 1), block_ids, host.to(self._device, non_blocking=True))
            self._stream.record_event().synchronize()

    def _num_bytes(self, layer: int, block_ids: Sequence[BlockId]) -> int:
        """Returns the bytes of one layer of these blocks; of states, in these pages."""
        return len(block_ids) // self._spec.layer_pages(layer) * self._spec.layer_bytes(layer)
