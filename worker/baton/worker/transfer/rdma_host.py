"""Staging in host memory, for the rdma transport of any worker whose blocks can be read and written from there."""

from __future__ import annotations

import ctypes
import mmap
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import InvalidRequest, NoCapacity
from baton.worker.core import BlockId
from baton.worker.executor.base import Executor
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.rdma_nixl import Memory
from baton.worker.transfer.rdma_staging import Gathered, Region


class HostRegion:
    """Pages that cost nothing until they are written."""

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes)
        self.values: NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self.memory = Memory(ctypes.addressof(ctypes.c_char.from_buffer(pages)), num_bytes)

    def close(self) -> None:
        """The pages go when nobody views them any more."""
        self.values = np.empty(0, np.uint8)


class HostStaging:
    """A Staging."""

    cuda_major = None

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def allocate(self, num_bytes: int) -> HostRegion:
        """Raises NoCapacity where the process may have no more memory."""
        try:
            return HostRegion(num_bytes)
        except OSError as error:
            raise NoCapacity(f"{num_bytes} bytes of staging cannot be had: {error}") from error

    def gather(self, piece: Piece, conversion: KvConversion | None, region: Region, start: int, limit: int) -> Gathered:
        """The piece is in when it returns."""
        assert isinstance(region, HostRegion), "of this staging"
        shape = (len(piece.block_ids), piece.num_layers, self._executor.layout.bytes_per_block_layer)
        if conversion is None:
            num_bytes = _checked(int(np.prod(shape)), limit)
            self._read(piece, region.values[start : start + num_bytes].reshape(shape))
        else:
            blocks = np.empty(shape, np.uint8)
            self._read(piece, blocks)
            data = conversion.on_host(blocks.reshape(-1).data, piece)
            num_bytes = _checked(data.nbytes, limit)
            region.values[start : start + num_bytes] = np.frombuffer(data, np.uint8)
        return Gathered(num_bytes, None)

    def access(self, region: Region, slot_bytes: int) -> HostSlots:
        """Of a region of this staging."""
        assert isinstance(region, HostRegion), "of this staging"
        return HostSlots(self._executor, region, slot_bytes)

    def _read(self, piece: Piece, out: NDArray[np.uint8]) -> None:
        for index in range(piece.num_layers):
            data = self._executor.read_blocks(piece.layer + index, piece.block_ids)
            out[:, index] = np.frombuffer(data, np.uint8).reshape(len(out), -1)


class HostSlots:
    """A SlotAccess."""

    def __init__(self, executor: Executor, region: HostRegion, slot_bytes: int) -> None:
        self._executor = executor
        self._region = region
        self._slot_bytes = slot_bytes

    def checksum(self, slot: int, num_bytes: int) -> int:
        """Raises InvalidRequest where so many bytes are not in such a slot."""
        return zlib.crc32(self._bytes(slot, num_bytes).data)

    def write(self, slot: int, layers: range, block_ids: Sequence[BlockId], heads: tuple[int, int] | None) -> None:
        """Raises InvalidRequest for a slot, layer, block or head that does not exist."""
        layout = self._executor.layout
        num_bytes = layout.bytes_per_block_layer
        if heads is not None:
            num_bytes = num_bytes // max(1, layout.num_kv_heads // layout.tp_size) * heads[1]
        values = self._bytes(slot, len(block_ids) * len(layers) * num_bytes)
        pieces = values.reshape(len(block_ids), len(layers), num_bytes)
        for index, layer in enumerate(layers):
            data = np.ascontiguousarray(pieces[:, index]).reshape(-1)
            self._executor.write_blocks(layer, block_ids, data.data, heads)

    def _bytes(self, slot: int, num_bytes: int) -> NDArray[np.uint8]:
        num_slots = self._region.memory.num_bytes // self._slot_bytes
        if not 0 <= slot < num_slots:
            raise InvalidRequest(f"slot {slot} is out of range: there are {num_slots}")
        if not 0 <= num_bytes <= self._slot_bytes:
            raise InvalidRequest(f"{num_bytes} bytes in a slot of {self._slot_bytes}")
        start = slot * self._slot_bytes
        return self._region.values[start : start + num_bytes]


def _checked(num_bytes: int, limit: int) -> int:
    if num_bytes > limit:
        raise InvalidRequest(f"a piece has {num_bytes} bytes, the receiver's slots have {limit}")
    return num_bytes
