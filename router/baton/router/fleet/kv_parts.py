"""The parts of a KV cache by what moves of them: to another worker, or back from host memory. Knows no rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from baton.v1 import kv_pb2

_BYTES = {
    kv_pb2.KV_DTYPE_FLOAT32: 4,
    kv_pb2.KV_DTYPE_BFLOAT16: 2,
    kv_pb2.KV_DTYPE_FLOAT16: 2,
    kv_pb2.KV_DTYPE_FLOAT8_E4M3: 1,
    kv_pb2.KV_DTYPE_SIMULATED: 8,
}


class KvPart(NamedTuple):
    """A group of which as many tokens move at the most."""

    share: float  # of a block's bytes in all layers that keep tokens; of states more than 1 if they are larger
    most_tokens: float


def kv_parts(layout: kv_pb2.KvLayout) -> tuple[KvPart, ...]:
    """Returns the parts of a layout. Empty: all tokens of all layers move.

    Of a window its tokens move, and at most a block more; of a state that of one block.
    """
    block_size = layout.block_size or 1
    sizes = [_block_bytes(group, block_size) for group in layout.groups]
    grow = [group.kind != kv_pb2.KV_GROUP_KIND_STATE for group in layout.groups]
    most = [_most_tokens(group, block_size) for group in layout.groups]
    whole = sum(compress(sizes, grow))
    if not whole or set(most) == {math.inf}:
        return ()
    return tuple(KvPart(size / whole, num_tokens) for size, num_tokens in zip(sizes, most, strict=True))


def moved_tokens(parts: Sequence[KvPart], num_tokens: float) -> float:
    """Returns as many tokens of all layers as have the bytes that move of `num_tokens`."""
    return sum(part.share * min(num_tokens, part.most_tokens) for part in parts) if parts else num_tokens


def _most_tokens(group: kv_pb2.KvGroup, block_size: int) -> float:
    match group.kind:
        case kv_pb2.KV_GROUP_KIND_WINDOW:
            return group.window + block_size
        case kv_pb2.KV_GROUP_KIND_STATE:
            return block_size
    return math.inf


def _block_bytes(group: kv_pb2.KvGroup, block_size: int) -> int:
    values = len(group.layers) * group.num_kv_heads * group.head_dim * _BYTES.get(group.dtype, 1)
    match group.kind:
        case kv_pb2.KV_GROUP_KIND_STATE:
            return values
        case kv_pb2.KV_GROUP_KIND_LATENT:
            return values * block_size
    return values * block_size * 2
