"""A sender that reuses its blocks for one transfer after the other, for a separate process."""

from __future__ import annotations

import torch
from support.transfer.kv_pusher import EPOCH, GENERATION, SHAPE, make_pool, make_transports

from baton.v1 import kv_pb2
from baton.worker.core import BlockId
from baton.worker.transfer.base import Outbound, Piece, Pushed, PushFenced


def content_of(number: int, size: int) -> torch.Tensor:
    """Returns the content of `size` blocks, [layers, size, ...] int16 on the GPU, equal in all processes."""
    shape = (SHAPE[0], size, *SHAPE[2:])
    generator = torch.Generator("cuda").manual_seed(number)
    return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16, device="cuda")


class Blocks:
    """The free blocks of a pool. Freed blocks are filled with noise."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._words = pool.view(torch.int16)
        self._free = [BlockId(index) for index in range(SHAPE[1])]

    def take(self, count: int) -> list[BlockId]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def fill(self, block_ids: list[BlockId], content: torch.Tensor) -> None:
        """Fills blocks and waits until that is done."""
        self._words[:, block_ids] = content
        torch.cuda.synchronize()

    def hold(self, block_ids: list[BlockId], content: torch.Tensor) -> bool:
        return torch.equal(self._words[:, block_ids], content)

    def give_back(self, block_ids: list[BlockId]) -> None:
        self.fill(block_ids, content_of(-1 - block_ids[0], len(block_ids)))
        self._free += block_ids[::-1]


class KvSource:
    """Sends one transfer after the other. Fills its blocks with noise as early as allowed."""

    def __init__(self, kind: str, address: kv_pb2.TransportAddress) -> None:
        pool = make_pool(1)
        self._transports = make_transports(kind, pool)
        self._blocks = Blocks(pool)
        self._addresses = [address]
        self._open: dict[int, list[BlockId]] = {}
        self._events: list[Pushed | PushFenced] = []

    def push(self, number: int, size: int, per_piece: int, fence: bool) -> None:
        """Sends `size` blocks with the content of that number, in pieces of `per_piece` blocks."""
        block_ids = self._open[number] = self._blocks.take(size)
        self._blocks.fill(block_ids, content_of(number, size))
        self._transports.connect(Outbound(number, self._addresses, number, EPOCH, GENERATION, False))
        for first in range(0, size, per_piece):
            ids = block_ids[first : first + per_piece]
            self._transports.push(number, Piece(0, first, len(ids), ids, num_layers=SHAPE[0]))
        self._transports.finish(number)
        if fence:
            self._transports.fence_outbound(number)
        self.idle()

    def idle(self) -> None:
        """Handles the transports' events and frees the blocks of ended transfers."""
        for event in self._transports.poll():
            assert isinstance(event, Pushed | PushFenced), event
            if (block_ids := self._open.pop(event.push_id, None)) is None:
                continue  # everything was sent before the fence
            self._blocks.give_back(block_ids)
            self._transports.forget(event.push_id)
            self._events.append(event)

    def events(self) -> list[Pushed | PushFenced]:
        """Returns the ends of transfers since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._transports.close()
