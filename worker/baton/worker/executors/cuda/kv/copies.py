"""Copies for transfers between blocks of a CUDA device's KV pool and contiguous memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from baton.kernels.kv.blocks import ALL_PROGRAMS, BlockCopier, gather_blocks, scatter_blocks
from baton.rpc.errors import InvalidRequest
from baton.worker.core import BlockId
from baton.worker.layers.state_places import StatePlaces

_NO_STATES: Mapping[range, StatePlaces] = MappingProxyType({})


class KvCopies:
    """Gathers and scatters blocks on the caller's current stream. Thread-safe.

    `pool` returns [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]. Groups of layers share it: `spans`
    are the KV layers of each, the first of which is layer 0 of the pool. Empty: there is one group. `states`: the KV
    layers of groups of states, whose values lie in blocks of the pool, their pages.
    """

    def __init__(
        self,
        pool: Callable[[], Tensor],
        spans: Sequence[range] = (),
        states: Mapping[range, StatePlaces] = _NO_STATES,
    ) -> None:
        self._pool = pool
        self._states = states
        self._spans = spans
        self._copier: BlockCopier | None = None  # of the current pool's address
        self.after: torch.cuda.Event | None = None  # writes to the pool must follow it

    @property
    def device(self) -> torch.device:
        """The device of the pool."""
        return self._pool().device

    def num_bytes(self, num_layers: int, num_blocks: int) -> int:
        """Returns the size of blocks of some layers."""
        pool = self._pool()
        return num_layers * num_blocks * pool[0, 0].numel() * pool.element_size()

    @torch.inference_mode()
    def gather(self, layers: range, block_ids: Sequence[BlockId], out: Tensor) -> Tensor:
        """Queues the copy of these blocks into `out` [num_bytes] uint8.

        Returns them as [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], in the same memory.
        """
        return self._gather(self.places(layers), block_ids, out)

    @property
    def has_states(self) -> bool:
        """Whether some KV layers have states."""
        return bool(self._states)

    def holds_states(self, layer: int) -> bool:
        """Returns whether a KV layer has states: their pieces are copied by `read_states` and `write_states`."""
        return any(layer in span for span in self._states)

    def num_state_bytes(self, layers: range, pages: Sequence[BlockId]) -> int:
        """Returns the bytes of some layers of the states in these pages."""
        _, places, each = self._states_at(layers, pages)
        return len(each) * len(layers) * places.num_bytes

    @torch.inference_mode()
    def read_states(self, layers: range, pages: Sequence[BlockId]) -> Tensor:
        """Queues the copy of some layers of the states in these pages, which are of a group of states.

        Returns uint8 [num_bytes], in the order of a piece: states, layers, and the values of each matrix.
        """
        span, places, each = self._states_at(layers, pages)
        found = [places.load(layer - span.start, each) for layer in layers]
        return torch.stack(found, 1).view(torch.uint8).flatten()

    @torch.inference_mode()
    def write_states(self, layers: range, pages: Sequence[BlockId], values: Tensor) -> Tensor:
        """Queues the copy of what `read_states` returns into these pages. Returns whether it holds NaN, a bool on the
        device."""
        span, places, each = self._states_at(layers, pages)
        if self.after is not None:
            self.order(torch.cuda.current_stream())
        given = values.view(torch.float32).view(len(each), len(layers), -1)
        for index, layer in enumerate(layers):
            places.store(layer - span.start, each, given[:, index])
        return given.isnan().any()

    def _states_at(self, layers: range, pages: Sequence[BlockId]) -> tuple[range, StatePlaces, Tensor]:
        """Returns the group's layers, its places, and the pages of each state."""
        span, places = next((span, places) for span, places in self._states.items() if layers.start in span)
        return span, places, torch.tensor(pages).view(-1, places.num_pages)

    @torch.inference_mode()
    def gather_pages(self, block_ids: Sequence[BlockId], out: Tensor) -> Tensor:
        """Queues the copy of blocks of any group, with all layers of the largest."""
        return self._gather(range(len(self._pool())), block_ids, out)

    def _gather(self, places: range, block_ids: Sequence[BlockId], out: Tensor) -> Tensor:
        pool = self._pool()[places.start : places.stop]
        values = _shaped(out, pool, len(block_ids))
        gather_blocks(pool, self._index(block_ids), out=values)
        return values

    @torch.inference_mode()
    def scatter(self, layers: range, block_ids: Sequence[BlockId], values: Tensor) -> None:
        """Queues the copy of `values` [num_bytes] uint8 into these blocks, which are distinct."""
        self._scatter(self.places(layers), block_ids, values)

    @torch.inference_mode()
    def scatter_pages(self, block_ids: Sequence[BlockId], values: Tensor) -> None:
        """Queues the copy into blocks of any group, of all layers of the largest."""
        self._scatter(range(len(self._pool())), block_ids, values)

    def places(self, layers: range) -> range:
        """Returns the layers of the pool that KV layers of one group are in."""
        for span in self._spans:
            if layers.start in span:
                return range(layers.start - span.start, layers.stop - span.start)
        return layers

    def _scatter(self, places: range, block_ids: Sequence[BlockId], values: Tensor) -> None:
        self.order(torch.cuda.current_stream())
        pool = self._pool()[places.start : places.stop]
        scatter_blocks(pool, self._index(block_ids), _shaped(values, pool, len(block_ids)))

    def order(self, stream: torch.cuda.Stream) -> None:
        """Orders later work on the stream after `after`, so that it may write to the pool."""
        if self.after is not None:
            stream.wait_event(self.after)

    def lane(self, num_slots: int, slot_bytes: int) -> CopyLane:
        """Returns a lane for the copies of one connection, between the pool and its slots of memory."""
        return CopyLane(self.copier, self.places, num_slots, slot_bytes)

    def copier(self) -> BlockCopier:
        """Returns the copier by addresses, which is valid until `release`."""
        copier = self._copier
        if copier is None:
            copier = self._copier = BlockCopier(self._pool())
        return copier

    def release(self) -> None:
        """Drops the copier before the pool is freed. No copy may be in progress."""
        self._copier = None

    def warm_up(self) -> None:
        """Compiles both kernels, on a free block."""
        values = torch.empty(self.num_bytes(1, 1), dtype=torch.uint8, device=self.device)
        self.gather(range(1), [BlockId(0)], values)
        self.scatter(range(1), [BlockId(0)], values)
        torch.cuda.current_stream(self.device).synchronize()

    def _index(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.from_numpy(np.asarray(block_ids, np.int32)).to(self.device, non_blocking=True)


class CopyLane:
    """Copies with little overhead on the host, for one thread at a time. A slot may be used again when its copy has
    ended.

    Kernels read block ids from pinned memory of the host.
    """

    def __init__(
        self, copier: Callable[[], BlockCopier], places: Callable[[range], range], num_slots: int, slot_bytes: int
    ) -> None:
        self._copier = copier
        self._places = places
        self._lane = copier().lane()
        self._block_bytes = copier().bytes_per_block_layer
        self._most = slot_bytes // self._block_bytes
        self._pinned = torch.empty(num_slots, max(1, self._most), dtype=torch.int32, pin_memory=True)
        self._ids = self._pinned.numpy()
        self._row_bytes = 4 * self._pinned.shape[1]
        self._start = self._pinned.data_ptr()

    def gather(
        self,
        slot: int,
        layers: range,
        block_ids: Sequence[BlockId],
        to: int,
        stream: int,
        max_programs: int = ALL_PROGRAMS,
    ) -> int:
        """Queues the copy of these blocks to an address. Returns its bytes. Raises InvalidRequest for too many."""
        count = self._put(slot, layers, block_ids)
        ids = self._start + slot * self._row_bytes
        self._lane.gather(self._copier(), self._places(layers), ids, count, to, stream, max_programs)
        return count * len(layers) * self._block_bytes

    def scatter(
        self,
        slot: int,
        layers: range,
        block_ids: Sequence[BlockId],
        source: int,
        stream: int,
        max_programs: int = ALL_PROGRAMS,
    ) -> None:
        """Queues the copy from an address into these blocks, which are distinct. Raises InvalidRequest for too many."""
        count = self._put(slot, layers, block_ids)
        ids = self._start + slot * self._row_bytes
        self._lane.scatter(self._copier(), self._places(layers), ids, count, source, stream, max_programs)

    def _put(self, slot: int, layers: range, block_ids: Sequence[BlockId]) -> int:
        count = len(block_ids)
        if not 0 < count * len(layers) <= self._most:
            raise InvalidRequest(
                f"a piece has {count} blocks of {len(layers)} layers; a slot takes 1 to {self._most} of one layer"
            )
        self._ids[slot, :count] = block_ids
        return count


def _shaped(memory: Tensor, pool: Tensor, num_blocks: int) -> Tensor:
    return memory.view(pool.dtype).view(num_blocks, pool.shape[0], *pool.shape[2:])
