"""Staging in CUDA device memory for the rdma transport: the network reads and writes the device's memory.

UCX uses GPUDirect where the fabric supports it, else copies through the host.
"""

from __future__ import annotations

import torch

from baton.rpc.errors import InvalidRequest
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.kinds.cuda_memory import CudaCopy, DeviceMemory
from baton.worker.transfer.kinds.cuda_slots import DeviceSlots, gathered
from baton.worker.transfer.kinds.rdma.nixl import Memory
from baton.worker.transfer.kinds.rdma.staging import Gathered, Region


class DeviceRegion:
    """Device memory that torch does not manage."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._memory = DeviceMemory(num_bytes)
        self.tensor = self._memory.tensor  # uint8
        self.memory = Memory(self._memory.address, num_bytes, True, self.tensor.device.index or 0)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._memory.close()


class CudaStaging:
    """A Staging on the pool's device."""

    def __init__(self, kv: KvCopies) -> None:
        self._kv = kv
        self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]
        kv.warm_up()

    @property
    def cuda_major(self) -> int | None:
        """The CUDA version that torch was built for."""
        version = torch.version.cuda
        return int(version.split(".")[0]) if version else None

    def allocate(self, num_bytes: int) -> DeviceRegion:
        """Allocates memory for slots. Raises InternalError if the device has none left."""
        return DeviceRegion(num_bytes, self._kv.device)

    def gather(self, piece: Piece, conversion: KvConversion | None, region: Region, start: int, limit: int) -> Gathered:
        """Queues the gather of a piece."""
        assert isinstance(region, DeviceRegion), "the region is of this staging"
        staging = region.tensor[start : start + limit]
        with torch.cuda.stream(self._stream):
            values = gathered(self._kv, piece, conversion, staging)
            num_bytes = values.numel()
            if num_bytes > limit:
                raise InvalidRequest(f"a piece has {num_bytes} bytes; the receiver's slots have {limit}")
            if conversion is not None:
                staging[:num_bytes].copy_(values)
            return Gathered(num_bytes, CudaCopy(self._stream))

    def access(self, region: Region, slot_bytes: int) -> DeviceSlots:
        """Returns access to a region of this staging."""
        assert isinstance(region, DeviceRegion), "the region is of this staging"
        return DeviceSlots(self._kv, region.tensor, slot_bytes)
