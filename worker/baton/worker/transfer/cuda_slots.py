"""What both CUDA transports do with a slot: a piece is gathered into one, checked in one, and scattered from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId
from baton.worker.cuda.kv_copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.checksum import checksum_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def gathered(kv: KvCopies, piece: Piece, conversion: KvConversion | None, staging: Tensor) -> Tensor:
    """Queues the gathering of a piece, in the receiver's layout: [num_bytes] uint8, in `staging` where nothing is
    converted."""
    layers = range(piece.layer, piece.layer + piece.num_layers)
    num_bytes = kv.num_bytes(piece.num_layers, len(piece.block_ids))
    if conversion is None:
        if num_bytes > staging.numel():
            raise InvalidRequest(f"a piece has {num_bytes} bytes, the receiver's slots have {staging.numel()}")
        kv.gather(layers, piece.block_ids, staging[:num_bytes])
        return staging[:num_bytes]
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=kv.device)
    converted = conversion.on_device(kv.gather(layers, piece.block_ids, memory), piece)
    return converted.contiguous().view(-1).view(torch.uint8)


class DeviceSlots:
    """One sender's slots in device memory, as a BulkReceiver has them."""

    def __init__(self, kv: KvCopies, memory: Tensor, slot_bytes: int) -> None:
        self._kv = kv
        self._memory = memory  # uint8
        self._slot_bytes = slot_bytes
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Copies the slot's bytes to the host."""
        with torch.cuda.stream(self._stream):
            values = cast("NDArray[np.uint8]", self._bytes(slot, num_bytes).cpu().numpy())
        return checksum_of(values.data)

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> None:
        """Raises InvalidRequest for a part of the heads: a CUDA worker has all of them."""
        if heads is not None:
            raise InvalidRequest("a piece has a part of the heads; this worker holds all of them", field="heads")
        with torch.cuda.stream(self._stream):
            values = self._bytes(slot, self._kv.num_bytes(len(layers), len(block_ids)))
            self._kv.scatter(layers, block_ids, values)
            self._stream.synchronize()

    def _bytes(self, slot: int, num_bytes: int) -> Tensor:
        start = slot * self._slot_bytes
        if num_bytes > self._slot_bytes:
            raise InvalidRequest(f"{num_bytes} bytes in a slot of {self._slot_bytes}")
        return self._memory[start : start + num_bytes]
