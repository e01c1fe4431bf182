"""Converts pieces of KV to another worker's layout: another block size, share of the heads or dtype.

The sender converts, so a piece is always whole blocks of the receiver. Moving values is exact. For the loss of a change
of dtype see `tensors`, which is loaded only for that, or on a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from baton.rpc.errors import Mismatch
from baton.v1 import types_pb2
from baton.worker.kv_spec import BYTES_PER_VALUE, KvGroup, KvKind, KvSpec
from baton.worker.transfer.base import KvConversion, Piece
from baton.worker.transfer.conversion.heads import heads_of, shared_heads
from baton.worker.transfer.layout import check_convertible

if TYPE_CHECKING:
    from torch import Tensor

    from baton.worker.transfer.conversion.tensors import Cast

_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def conversion_to(sender: KvSpec, receiver: KvSpec) -> KvConversion | None:
    """Returns the conversion from one sender rank's layout to one receiver rank's. None: the layouts are equal.

    Raises Mismatch, with both ends' values, if there is no conversion or these ranks share no heads.
    """
    check_convertible(sender, receiver)
    groups = [GroupConversion(sender, receiver, index) for index in range(len(sender.groups))]
    return BlockConversion(groups) if any(group.changes for group in groups) else None


def worker_conversion(sender: KvSpec, receiver: KvSpec) -> KvConversion | None:
    """Returns the conversion between two workers of one rank each. Both ends of a hand-over call this.

    Raises Mismatch also for workers of several ranks: an engine pushes to one receiver.
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
    """A KvConversion: each group has its own. Thread-safe."""

    def __init__(self, groups: Sequence[GroupConversion]) -> None:
        self._groups = groups

    def heads(self, layer: int) -> tuple[int, int] | None:
        """Returns the receiver rank's heads that a KV layer's pieces have; None: all."""
        return self._group(layer).heads

    def layer_bytes(self, layer: int) -> int:
        """Returns the bytes of one of the receiver's blocks in a KV layer, of these heads."""
        return self._group(layer).layer_bytes

    def on_host(self, data: memoryview, piece: Piece) -> memoryview:
        """Converts a piece, given as len(piece.block_ids) whole blocks of the sender."""
        return self._group(piece.layer).on_host(data, piece)

    def on_device(self, values: Tensor, piece: Piece) -> Tensor:
        """Converts [len(piece.block_ids), num_layers, 2, KV heads of the rank, block_size, head_dim].

        The values are of the sender's dtype, or integers of its width. Returns [num_blocks, num_layers, 2, heads,
        block_size, head_dim].
        """
        return self._group(piece.layer).on_device(values, piece)

    def _group(self, layer: int) -> GroupConversion:
        for group in self._groups:
            if layer in group.layers:
                return group
        raise IndexError(f"no group has KV layer {layer}")


class GroupConversion:
    """Converts the pieces of one group. Raises Mismatch if the two ranks share none of its heads."""

    def __init__(self, sender: KvSpec, receiver: KvSpec, index: int) -> None:
        ours, theirs = sender.groups[index], receiver.groups[index]
        shared = shared_heads(sender, receiver, index)
        if shared is None:
            raise Mismatch(
                f"rank {sender.tp_rank} of {sender.tp_size} has no KV heads to send to rank {receiver.tp_rank} of "
                f"{receiver.tp_size}",
                field="layout.tp_rank",
                phase=types_pb2.PHASE_TRANSFER,
            )
        self.layers = sender.spans[index]  # KV layers
        same_values = (ours.dtype, _tokens_a_block(sender, ours)) == (theirs.dtype, _tokens_a_block(receiver, theirs))
        self.changes = not same_values or heads_of(sender, index) != heads_of(receiver, index)
        whole = shared.count == receiver.num_rank_heads(theirs)
        self.heads = None if whole else (shared.at_receiver, shared.count)
        self.layer_bytes = receiver.bytes_per_block_layer(theirs, shared.count)
        self._from, self._to = ours, theirs
        self._shape = sender.block_shape(ours)
        self._from_heads = slice(shared.at_sender, shared.at_sender + shared.count)
        self._to_tokens = receiver.block_shape(theirs)[2]
        self._cast: Cast | None = None

    def on_host(self, data: memoryview, piece: Piece) -> memoryview:
        """Converts a piece, as BlockConversion.on_host."""
        if self._from.kind is KvKind.STATE:
            return data
        words = np.frombuffer(data, _WORDS[BYTES_PER_VALUE[self._from.dtype]])
        blocks = words.reshape(len(piece.block_ids), piece.num_layers, *self._shape)[:, :, :, self._from_heads]
        moved = regroup(blocks, piece.skip_tokens, piece.num_blocks, self._to_tokens)
        if self._from.dtype != self._to.dtype:
            moved = self._caster().on_host(moved, piece.layer - self.layers.start)
        return moved.data.cast("B")

    def on_device(self, values: Tensor, piece: Piece) -> Tensor:
        """Converts a piece, as BlockConversion.on_device."""
        from baton.worker.transfer.conversion import tensors

        if self._from.kind is KvKind.STATE:
            return values
        moved = tensors.regroup(
            tensors.as_words(values)[:, :, :, self._from_heads],
            piece.skip_tokens,
            piece.num_blocks,
            self._to_tokens,
        )
        return self._caster().on_device(moved, piece.layer - self.layers.start)

    def _caster(self) -> Cast:
        if self._cast is None:
            from baton.worker.transfer.conversion.tensors import Cast

            self._cast = Cast(self._from, self._to)
        return self._cast


def _tokens_a_block(spec: KvSpec, group: KvGroup) -> int:
    return 1 if group.kind is KvKind.STATE else spec.block_size


def regroup(blocks: NDArray[Any], skip_tokens: int, num_blocks: int, block_size: int) -> NDArray[Any]:
    """Returns [blocks, layers, 2, heads, tokens, dim] as `num_blocks` blocks of `block_size` tokens, after
    `skip_tokens`.

    Pads the last block with 0. Copies once if one block size divides the other.
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
