"""KV layouts on the wire, and which pairs KV can pass between. The one place that says what can be served.

Both ends of a hand-over judge with the same function over the same two layouts, the sender's and the receiver's, so
they always agree. The sender converts; the rules:

    model_digest, num_layers, num_kv_heads, head_dim   must be equal
    block_size                                         any, at each end
    tp_size, tp_rank                                   any, where one of ranks and heads divides the other
    dtype                                              float32, bfloat16, float16, float8_e4m3: each into each;
                                                       what a conversion loses stands in conversion_torch
    kv_scales                                          equal, where both ends hold 8 bits
"""

from __future__ import annotations

import math

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2, types_pb2
from baton.worker.executors.base import KvLayout

_DTYPES = {
    "float32": kv_pb2.KV_DTYPE_FLOAT32,
    "bfloat16": kv_pb2.KV_DTYPE_BFLOAT16,
    "float16": kv_pb2.KV_DTYPE_FLOAT16,
    "float8_e4m3": kv_pb2.KV_DTYPE_FLOAT8_E4M3,
    "simulated": kv_pb2.KV_DTYPE_SIMULATED,
}
_NAMES = {number: name for name, number in _DTYPES.items()}
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "simulated": 8}

_MAX_BLOCK_LAYER_BYTES = 64 << 20  # a piece holds a whole block; a layout that says more is no layout
_COMPARED = ("model_digest", "num_layers", "num_kv_heads", "head_dim")


def layout_message(layout: KvLayout) -> kv_pb2.KvLayout:
    """The contract's form of a layout."""
    return kv_pb2.KvLayout(
        model_digest=layout.model_digest,
        dtype=_DTYPES[layout.dtype],
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        tp_rank=layout.tp_rank,
        kv_scales=layout.kv_scales,
    )


def layout_of(message: kv_pb2.KvLayout) -> KvLayout:
    """The layout that a message stands for. Raises Mismatch where this version knows no such one."""
    dtype = _NAMES.get(message.dtype)
    if dtype is None:
        raise _mismatch(
            f"the peer's KV dtype is number {message.dtype}; this worker knows {', '.join(_DTYPES)}", "dtype"
        )
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        if getattr(message, name) < 1:
            raise _mismatch(f"the peer's KV layout has {name}=0; it must be at least 1", name)
    tp_size, num_heads = message.tp_size or 1, message.num_kv_heads
    if num_heads % tp_size and tp_size % num_heads:
        raise _mismatch(
            f"the peer's {num_heads} KV heads are on {tp_size} ranks; one of the two must divide the other", "tp_size"
        )
    if message.tp_rank >= tp_size:
        raise _mismatch(f"the peer has rank {message.tp_rank} of {tp_size}; it must be below", "tp_rank")
    _check_scales(message, dtype)
    values = math.prod(block_shape(dtype, max(1, num_heads // tp_size), message.block_size, message.head_dim))
    num_bytes = values * BYTES_PER_VALUE[dtype]
    if num_bytes > _MAX_BLOCK_LAYER_BYTES:
        raise _mismatch(
            f"a block of one layer has {num_bytes} bytes at the peer; at most {_MAX_BLOCK_LAYER_BYTES} are moved",
            "block_size",
        )
    return KvLayout(
        model_digest=message.model_digest,
        dtype=dtype,
        num_layers=message.num_layers,
        num_kv_heads=num_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        bytes_per_block_layer=num_bytes,
        tp_size=tp_size,
        tp_rank=message.tp_rank,
        kv_scales=tuple(message.kv_scales),
    )


def block_shape(dtype: str, num_heads: int, block_size: int, head_dim: int) -> tuple[int, int, int, int]:
    """A block of one layer of one rank: keys and values, heads, tokens, head_dim. The simulator has a word a token."""
    return (1, 1, block_size, 1) if dtype == "simulated" else (2, num_heads, block_size, head_dim)


def check_convertible(sender: KvLayout, receiver: KvLayout) -> None:
    """Raises Mismatch, naming what differs on both sides, unless the sender can convert into the receiver's layout.

    Says nothing of whether these two ranks have heads in common.
    """
    different = [name for name in _COMPARED if getattr(sender, name) != getattr(receiver, name)]
    if sender.dtype != receiver.dtype and "simulated" in (sender.dtype, receiver.dtype):
        different.append("dtype")
    if sender.dtype == receiver.dtype and sender.kv_scales != receiver.kv_scales:
        different.append("kv_scales")
    if not different and sender.bytes_per_block_layer != _num_bytes(sender):
        different.append("bytes_per_block_layer")
    if not different and receiver.bytes_per_block_layer != _num_bytes(receiver):
        different.append("bytes_per_block_layer")
    if different:
        at_sender, at_receiver = _values(sender, different), _values(receiver, different)
        raise _mismatch(
            f"KV cannot be handed over: the prefill worker has {at_sender}, the decode worker has {at_receiver}",
            different[0],
        )


def _num_bytes(layout: KvLayout) -> int:
    shape = block_shape(layout.dtype, layout.num_rank_kv_heads, layout.block_size, layout.head_dim)
    return math.prod(shape) * BYTES_PER_VALUE[layout.dtype]


def _check_scales(message: kv_pb2.KvLayout, dtype: str) -> None:
    count, expected = len(message.kv_scales), 2 * message.num_layers
    if count and dtype != "float8_e4m3":
        raise _mismatch(f"the peer has {count} kv_scales for {dtype}; only float8_e4m3 takes any", "kv_scales")
    if count not in (0, expected):
        raise _mismatch(f"the peer has {count} kv_scales; it must be {expected} of them, or none", "kv_scales")
    for scale in message.kv_scales:
        if not 0 < scale < math.inf:
            raise _mismatch(f"the peer has a KV scale of {scale}; it must be above 0 and finite", "kv_scales")


def _mismatch(message: str, name: str) -> Mismatch:
    return Mismatch(message, field=f"layout.{name}", phase=types_pb2.PHASE_TRANSFER)


def _values(layout: KvLayout, names: list[str]) -> str:
    return ", ".join(f"{name}={_shown(getattr(layout, name))}" for name in names)


def _shown(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return [f"{number:g}" for number in value] if isinstance(value, tuple) else value
