"""Pieces of KV in another worker's layout: other block size, other share of the heads, other dtype.

The sender converts, so that a piece is always whole blocks of the receiver. Moving values about is exact; what a
change of dtype loses is said in conversion_torch, which is loaded only for one, or on a device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import Mismatch
from baton.v1 import types_pb2
from baton.worker.executors.base import KvLayout
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.conversion.heads import SharedHeads, heads_of, shared_heads
from baton.worker.transfer.layout import BYTES_PER_VALUE, block_shape, check_convertible

if TYPE_CHECKING:
    from torch import Tensor

    from baton.worker.transfer.conversion.tensors import Cast

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def conversion_to(sender: KvLayout, receiver: KvLayout) -> KvConversion | None:
    """From one sender rank's layout to one receiver rank's. None: the sender's blocks are the receiver's, as they are.

    Raises Mismatch, naming both sides, where there is no conversion, or where these ranks have no heads to pass on.
    """
    check_convertible(sender, receiver)
    heads = shared_heads(sender, receiver)
    if heads is None:
        raise Mismatch(
            f"rank {sender.tp_rank} of {sender.tp_size} has no KV heads to send to rank {receiver.tp_rank} of "
            f"{receiver.tp_size}",
            field="layout.tp_rank",
            phase=types_pb2.PHASE_TRANSFER,
        )
    same_values = (sender.dtype, sender.block_size) == (receiver.dtype, receiver.block_size)
    if same_values and heads_of(sender) == heads_of(receiver):
        return None
    return BlockConversion(sender, receiver, heads)


def worker_conversion(sender: KvLayout, receiver: KvLayout) -> KvConversion | None:
    """conversion_to between two workers of one rank each, as both ends of a hand-over ask for it.

    Raises Mismatch for workers of several ranks too: an engine pushes to one receiver.
    """
    check_convertible(sender, receiver)
    if sender.tp_size > 1 or receiver.tp_size > 1:
        raise Mismatch(
            f"KV cannot be handed over: the prefill worker has tp_size={sender.tp_size}, the decode worker has "
            f"tp_size={receiver.tp_size}; it must be 1 at both",
            field="layout.tp_size",
            phase=types_pb2.PHASE_TRANSFER,
        )
    return conversion_to(sender, receiver)


class BlockConversion:
    """A KvConversion. Thread-safe."""

    def __init__(self, sender: KvLayout, receiver: KvLayout, heads: SharedHeads) -> None:
        self._sender = sender
        self._receiver = receiver
        self._from_heads = slice(heads.at_sender, heads.at_sender + heads.count)
        self._cast: Cast | None = None
        whole = heads.count == receiver.num_rank_kv_heads
        self.heads = None if whole else (heads.at_receiver, heads.count)
        shape = block_shape(receiver.dtype, heads.count, receiver.block_size, receiver.head_dim)
        self.bytes_per_block_layer = math.prod(shape) * BYTES_PER_VALUE[receiver.dtype]

    def on_host(self, data: memoryview, piece: Piece) -> memoryview:
        """The piece as the receiver takes it, from len(piece.block_ids) whole blocks of the sender."""
        sender, receiver = self._sender, self._receiver
        shape = block_shape(sender.dtype, sender.num_rank_kv_heads, sender.block_size, sender.head_dim)
        words = np.frombuffer(data, _WORDS[BYTES_PER_VALUE[sender.dtype]])
        blocks = words.reshape(len(piece.block_ids), piece.num_layers, *shape)[:, :, :, self._from_heads]
        moved = regroup(blocks, piece.skip_tokens, piece.num_blocks, receiver.block_size)
        if sender.dtype != receiver.dtype:
            moved = self._caster().on_host(moved, piece.layer)
        return moved.data.cast("B")

    def on_device(self, values: Tensor, piece: Piece) -> Tensor:
        """The same of [len(piece.block_ids), num_layers, 2, kv heads of the rank, block_size, head_dim], in the
        sender's dtype or as integers of its width: [num_blocks, num_layers, 2, heads, block_size, head_dim]."""
        from baton.worker.transfer.conversion import tensors as conversion_torch

        moved = conversion_torch.regroup(
            conversion_torch.as_words(values)[:, :, :, self._from_heads],
            piece.skip_tokens,
            piece.num_blocks,
            self._receiver.block_size,
        )
        return self._caster().on_device(moved, piece.layer)

    def _caster(self) -> Cast:
        if self._cast is None:
            from baton.worker.transfer.conversion.tensors import Cast

            self._cast = Cast(self._sender, self._receiver)
        return self._cast


def regroup(blocks: NDArray[Any], skip_tokens: int, num_blocks: int, block_size: int) -> NDArray[Any]:
    """[blocks, layers, 2, heads, tokens, dim] as num_blocks blocks of block_size tokens, from skip_tokens on.

    What the last block has beyond the given ones is 0. One copy where one block size divides the other.
    """
    num_given, num_layers, parts, heads, size, dim = blocks.shape
    unit = math.gcd(size, block_size)
    at_sender, at_receiver = size // unit, block_size // unit
    units = blocks.reshape(num_given, num_layers, parts, heads, at_sender, unit, dim)
    units = units.transpose(0, 4, 1, 2, 3, 5, 6).reshape(-1, num_layers, parts, heads, unit, dim)
    first, wanted = skip_tokens // unit, num_blocks * at_receiver
    units = units[first : first + wanted]
    if len(units) < wanted:
        missing = np.zeros((wanted - len(units), *units.shape[1:]), units.dtype)
        units = np.concatenate((units, missing))
    grouped = units.reshape(num_blocks, at_receiver, num_layers, parts, heads, unit, dim).transpose(0, 2, 3, 4, 1, 5, 6)
    return np.ascontiguousarray(grouped).reshape(num_blocks, num_layers, parts, heads, block_size, dim)
