"""The memory of KV blocks in the host: one tensor per shape for the model, the same bytes for transfers.

Knows no requests.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.rpc.errors import DataLoss, InvalidRequest, Unsupported
from baton.worker.core import BlockId
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.layers.state_places import StatePlaces


class KvMemory:
    """The memory of all groups of tokens, each with `num_blocks` blocks and the null block.

    Groups of one shape share theirs: a block is then held in one of them at a time.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, dtype: torch.dtype) -> None:
        self.null_block = num_blocks
        self._spec = spec
        groups = spec.token_groups
        largest = {spec.block_shape(group): group for group in sorted(groups, key=lambda group: group.num_layers)}
        shared = {shape: GroupMemory(spec, group, num_blocks, dtype) for shape, group in largest.items()}
        self.groups = tuple(shared[spec.block_shape(group)].part(group.num_layers) for group in groups)
        self._shared = tuple(shared.values())
        self.layers = [blocks for group in self.groups for blocks in group.bytes]  # each [num_blocks + 1, bytes]
        self.tensors = [blocks for group in self.groups for blocks in group.tensor.unbind()]  # the same, as values
        self._layer_index = [(group, index) for group in self.groups for index in range(len(group.bytes))]

    @cached_property
    def states(self) -> Mapping[int, StatePlaces]:
        """The groups of states, over the pages of the others."""
        found = {index: group for index, group in enumerate(self._spec.groups) if group.kind is KvKind.STATE}
        if not found:
            return {}
        pages = self.values.flatten(2).view(torch.float32)
        return {index: StatePlaces(lambda: pages, self._spec.placed_state(group)) for index, group in found.items()}

    @property
    def values(self) -> Tensor:
        """All blocks of groups of one shape, [num_layers, num_blocks + 1, parts, heads, tokens, values]."""
        (memory,) = self._shared
        return memory.tensor

    def tensor(self, layer: int) -> Tensor:
        """Returns the blocks of a KV layer; of one with states those of the first layer, which it does not use."""
        return self.tensors[layer if layer < len(self.tensors) else 0]

    @property
    def pages(self) -> NDArray[np.uint8]:
        """All blocks, [num_layers, num_blocks + 1, bytes]. Raises Unsupported for groups of different shapes."""
        if len(self._shared) > 1:
            raise Unsupported(f"KV groups of {len(self._shared)} shapes share no blocks", field="model")
        return self._shared[0].bytes

    def read(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray:
        """Returns a copy of one KV layer of these blocks of its group."""
        if layer >= len(self._layer_index):
            states, place, pages = self._find_states(layer, block_ids)
            return bytearray(states.load(place, pages).numpy().tobytes())
        group, index = self._find(layer)
        return group.read(index, block_ids)

    def write(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one KV layer into these blocks. `heads` are the first head and their number; None: all."""
        if layer >= len(self._layer_index):
            states, place, pages = self._find_states(layer, block_ids)
            expected = len(pages) * self._spec.layer_bytes(layer)
            if data.nbytes != expected or heads not in (None, (0, 1)):
                raise InvalidRequest(
                    f"{data.nbytes} bytes for layer {layer} of {len(pages)} states; it must be {expected}", field="data"
                )
            values = torch.from_numpy(np.frombuffer(data, np.float32).copy())
            if bool(values.isnan().any()):
                model_layer = self._spec.groups[self._spec.group_of(layer)].layers[place]
                raise DataLoss(f"the state of layer {model_layer} that another worker sent holds NaN")
            states.store(place, pages, values.view(len(pages), -1))
            return
        group, index = self._find(layer)
        group.write(index, block_ids, data, heads)

    def free(self) -> int:
        """Frees the pages, which then read as zeros. Returns their bytes, including untouched ones."""
        return sum(memory.free() for memory in self._shared)

    def _find_states(self, layer: int, pages: Sequence[BlockId]) -> tuple[StatePlaces, int, Tensor]:
        """Returns a layer's group, its place there, and the pages of each state."""
        spec = self._spec
        if layer >= spec.num_layers:
            raise InvalidRequest(f"layer {layer} does not exist: allowed are 0 to {spec.num_layers - 1}", field="layer")
        group = spec.group_of(layer)
        each = spec.pages_each(spec.groups[group])
        if len(pages) % each or not all(0 <= page < self.null_block for page in pages):
            raise InvalidRequest(
                f"{len(pages)} blocks for states of {each}; they must be from 0 to {self.null_block - 1}",
                field="block_ids",
            )
        return self.states[group], layer - spec.spans[group].start, torch.tensor(pages).view(-1, each)

    def _find(self, layer: int) -> tuple[GroupMemory, int]:
        if not 0 <= layer < len(self._layer_index):
            raise InvalidRequest(
                f"layer {layer} does not exist: allowed are 0 to {len(self._layer_index) - 1}", field="layer"
            )
        return self._layer_index[layer]


class GroupMemory:
    """Zeroed pages that take no memory until they are written. Has the null block in addition to `num_blocks`.

    Padding in block tables refers to the null block, so that other requests' values, which may be infinite, are never
    read. Layers are numbered within the group.
    """

    def __init__(self, spec: KvSpec, group: KvGroup, num_blocks: int, dtype: torch.dtype) -> None:
        parts, self._num_heads, tokens, values = spec.block_shape(group)
        self._num_blocks = num_blocks
        self._block_bytes = spec.bytes_per_block_layer(group)
        shape = (group.num_layers, num_blocks + 1, parts, self._num_heads, tokens, values)
        num_bytes = group.num_layers * self._block_bytes * (num_blocks + 1)
        memory = reserve(num_bytes, f"{num_blocks} KV blocks", "kv_cache_memory")
        self._pages = memory
        self.tensor: Tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        # [num_layers, num_blocks + 1, bytes of one layer of a block], the same memory.
        self.bytes = np.frombuffer(memory, np.uint8).reshape(group.num_layers, num_blocks + 1, self._block_bytes)

    def part(self, num_layers: int) -> GroupMemory:
        """Returns the first layers, in the same memory."""
        part = copy(self)
        part.tensor, part.bytes = self.tensor[:num_layers], self.bytes[:num_layers]
        return part

    @property
    def _heads(self) -> NDArray[np.uint8]:
        num_layers, num_blocks, _ = self.bytes.shape
        return self.bytes.reshape(num_layers, num_blocks, self.tensor.shape[2], self._num_heads, -1)

    def read(self, layer: int, block_ids: Sequence[BlockId]) -> bytearray:
        """Returns a copy of one layer of these blocks."""
        blocks = self._check(block_ids)
        data = bytearray(len(blocks) * self._block_bytes)
        np.take(
            self.bytes[layer], blocks, axis=0, out=np.frombuffer(data, np.uint8).reshape(len(blocks), -1), mode="clip"
        )
        return data

    def write(
        self, layer: int, block_ids: Sequence[BlockId], data: memoryview, heads: tuple[int, int] | None = None
    ) -> None:
        """Copies one layer into these blocks. `heads` are the first head and their number; None: all."""
        blocks = self._check(block_ids)
        num_heads = self._num_heads
        first, count = heads or (0, num_heads)
        if not 0 <= first < first + count <= num_heads:
            raise InvalidRequest(
                f"KV heads [{first}, {first + count}) do not exist: there are {num_heads}", field="heads"
            )
        expected = len(blocks) * (self._block_bytes // num_heads) * count
        if data.nbytes != expected:
            raise InvalidRequest(
                f"{data.nbytes} bytes for layer {layer} of {len(blocks)} blocks; it must be {expected}", field="data"
            )
        if expected:
            values = np.frombuffer(data, np.uint8)
            if heads is None:
                self.bytes[layer, blocks] = values.reshape(len(blocks), -1)
            else:
                self._heads[layer, blocks, :, first : first + count] = values.reshape(
                    len(blocks), self.tensor.shape[2], count, -1
                )

    def free(self) -> int:
        """Frees the pages, which then read as zeros. Returns their bytes, including untouched ones."""
        return free_pages(self._pages)

    def _check(self, block_ids: Sequence[BlockId]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        blocks = np.fromiter(block_ids, np.int64, len(block_ids))
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            wrong = blocks[(blocks < 0) | (blocks >= self._num_blocks)][0]
            raise InvalidRequest(
                f"block {wrong} does not exist: allowed are 0 to {self._num_blocks - 1}", field="block_ids"
            )
        return blocks


def reserve(num_bytes: int, what: str, field: str) -> mmap.mmap:
    """Reserves zeroed pages, allocated when written. Raises InvalidRequest with `field` if there are not enough."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        alternative = " or num_blocks" if field == "kv_cache_memory" else ""
        raise InvalidRequest(
            f"{what} need {num_bytes} bytes, which this machine does not give ({error}): lower {field}{alternative}",
            field=field,
        ) from error


def free_pages(pages: mmap.mmap) -> int:
    """Returns pages of `reserve` to the system; they then read as zeros. Returns their bytes."""
    if hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)
    else:
        np.frombuffer(pages, np.uint8)[:] = 0
    return len(pages)
