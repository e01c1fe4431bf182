"""Pools on the GPU that hold states, and a sender of them over a bulk path, for a separate process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from support.transfer.kv_sender import make_path
from torch import Tensor

from baton.worker.core import BlockId
from baton.worker.executors.cuda.kv.copies import KvCopies
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.layers.state_places import StatePlaces
from baton.worker.state_pieces import StateMatrix
from baton.worker.transfer.base import Piece
from baton.worker.transfer.bulk import BulkSender, Slots

NUM_PAGES = 60
NUM_LAYERS = 3  # with states
_MATRICES = (StateMatrix(1, 3, 160), StateMatrix(4, 24, 32))  # of a layer


class StatePool(NamedTuple):
    """Random values in pages, and the states in them."""

    spec: KvSpec
    memory: Tensor
    places: StatePlaces
    kv: KvCopies

    @property
    def layers(self) -> range:
        """KV layers of the states."""
        return self.spec.spans[1]

    @property
    def piece_bytes(self) -> int:
        """Bytes of one state of all layers."""
        return NUM_LAYERS * self.spec.layer_bytes(self.layers.start)

    def pages(self, first: int) -> list[BlockId]:
        """Returns the pages of a state: every seventh from `first` on."""
        return [BlockId((first + 7 * index) % NUM_PAGES) for index in range(self.places.num_pages)]

    def state(self, first: int) -> Tensor:
        """Returns the state in `pages(first)`, [NUM_LAYERS, values] on the host."""
        pages = torch.tensor([self.pages(first)])
        return torch.cat([self.places.load(layer, pages) for layer in range(NUM_LAYERS)]).cpu()


def state_pool(block_size: int, seed: int) -> StatePool:
    """Returns a pool of pages of `block_size` tokens in bf16."""
    tokens = KvGroup(KvKind.FULL, (0, 1), "bfloat16", 2, 64)
    values = sum(matrix.num_values for matrix in _MATRICES)
    states = KvGroup(KvKind.STATE, (2, 3, 4), "float32", 1, values, matrices=_MATRICES)
    spec = KvSpec(bytes(16), block_size, (tokens, states))
    shape = spec.block_shape(tokens)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(2, NUM_PAGES, spec.bytes_per_block_layer(tokens) // 4, generator=generator)
    memory = words.cuda().view(torch.bfloat16).view(2, NUM_PAGES, *shape)
    places = StatePlaces(lambda: memory.flatten(2).view(torch.float32), spec.placed_state(states))
    return StatePool(spec, memory, places, KvCopies(lambda: memory, spec.spans, {spec.spans[1]: places}))


class StateSource:
    """Sends the states of `state_pool(16, 1)` over a bulk path."""

    def __init__(self, kind: str) -> None:
        self._pool = state_pool(16, 1)
        self._path = make_path(kind, self._pool.kv)
        self._sender: BulkSender | None = None

    def offer(self) -> bytes:
        return self._path.offer()

    def connect(self, slots: Slots) -> None:
        self._sender = self._path.connect(slots)

    def put(self, first: int, slot: int) -> None:
        """Sends one state of all layers."""
        assert self._sender is not None
        layers = self._pool.layers
        piece = Piece(layers.start, 0, 1, self._pool.pages(first), num_layers=len(layers))
        assert self._sender.put(piece, slot, None).wait(10)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._path.close()
