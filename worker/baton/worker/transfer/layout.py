"""KV layouts on the wire, and whether two workers' fit together. The one place that says which can be served."""

from __future__ import annotations

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2, types_pb2
from baton.worker.executor.base import KvLayout

_DTYPES = {
    "float32": kv_pb2.KV_DTYPE_FLOAT32,
    "bfloat16": kv_pb2.KV_DTYPE_BFLOAT16,
    "float16": kv_pb2.KV_DTYPE_FLOAT16,
    "float8_e4m3": kv_pb2.KV_DTYPE_FLOAT8_E4M3,
    "simulated": kv_pb2.KV_DTYPE_SIMULATED,
}
_NAMES = {number: name for name, number in _DTYPES.items()}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
_SIMULATED_BYTES_PER_TOKEN = 8

_COMPARED = ("model_digest", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size", "tp_size", "tp_rank")


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
    )


def layout_of(message: kv_pb2.KvLayout) -> KvLayout:
    """The layout that a message stands for. Raises Mismatch where this version knows no such one."""
    dtype = _NAMES.get(message.dtype)
    if dtype is None:
        raise Mismatch(
            f"the peer's KV dtype is number {message.dtype}; this worker knows {', '.join(_DTYPES)}",
            field="layout.dtype",
            phase=types_pb2.PHASE_TRANSFER,
        )
    tp_size = message.tp_size or 1
    if dtype == "simulated":
        num_bytes = _SIMULATED_BYTES_PER_TOKEN * message.block_size
    else:
        num_heads = message.num_kv_heads // tp_size
        num_bytes = 2 * num_heads * message.block_size * message.head_dim * _BYTES[dtype]
    return KvLayout(
        model_digest=message.model_digest,
        dtype=dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        bytes_per_block_layer=num_bytes,
        tp_size=tp_size,
        tp_rank=message.tp_rank,
    )


def check_compatible(local: KvLayout, remote: KvLayout) -> None:
    """Raises Mismatch, naming what differs on both sides, unless KV can pass between the two as it is."""
    different = [name for name in _COMPARED if getattr(local, name) != getattr(remote, name)]
    if not different and local.bytes_per_block_layer != remote.bytes_per_block_layer:
        different = ["bytes_per_block_layer"]
    if different:
        here, there = _values(local, different), _values(remote, different)
        raise Mismatch(
            f"KV cannot be handed over: this worker has {here}, the peer has {there}",
            field=f"layout.{different[0]}",
            phase=types_pb2.PHASE_TRANSFER,
        )


def _values(layout: KvLayout, names: list[str]) -> str:
    return ", ".join(f"{name}={_shown(getattr(layout, name))}" for name in names)


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value
