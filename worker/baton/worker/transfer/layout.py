"""KV layouts as messages, and the pairs of layouts between which KV can be handed over.

Both ends of a hand-over check the same two specs, the sender's and the receiver's, with the same function, so they
always agree. The sender converts; the rules:

    model_digest                                       must be equal
    groups: number, kind, layers, num_kv_heads,        must be equal, group by group
            head_dim, window
    block_size                                         any, at each end; states do not depend on it
    tp_size, tp_rank                                   any, where one of ranks and heads divides the other
    dtype                                              float32, bfloat16, float16, float8_e4m3: each into each;
                                                       see conversion/tensors.py for what a conversion loses
    kv_scales                                          equal, where both ends hold 8 bits

A cache of one full group over all layers has a message without groups, as in releases before groups existed. Any other
cache has a message with groups only, which those releases refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2, types_pb2
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec

_DTYPES = {
    "float32": kv_pb2.KV_DTYPE_FLOAT32,
    "bfloat16": kv_pb2.KV_DTYPE_BFLOAT16,
    "float16": kv_pb2.KV_DTYPE_FLOAT16,
    "float8_e4m3": kv_pb2.KV_DTYPE_FLOAT8_E4M3,
    "simulated": kv_pb2.KV_DTYPE_SIMULATED,
}
_NAMES = {number: name for name, number in _DTYPES.items()}
_KINDS = {
    KvKind.FULL: kv_pb2.KV_GROUP_KIND_FULL,
    KvKind.WINDOW: kv_pb2.KV_GROUP_KIND_WINDOW,
    KvKind.LATENT: kv_pb2.KV_GROUP_KIND_LATENT,
    KvKind.STATE: kv_pb2.KV_GROUP_KIND_STATE,
}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}

_MAX_BLOCK_LAYER_BYTES = 64 << 20  # a piece holds a whole block; larger layouts are refused
_MAX_LAYERS = 1 << 16  # the number of layers that a piece header can name


def layout_message(spec: KvSpec) -> kv_pb2.KvLayout:
    """Returns the contract's message of a spec."""
    message = kv_pb2.KvLayout(
        model_digest=spec.model_digest, block_size=spec.block_size, tp_size=spec.tp_size, tp_rank=spec.tp_rank
    )
    if not _is_one_full_group(spec):
        message.groups.extend(map(_group_message, spec.groups))
        return message
    (group,) = spec.groups
    message.dtype, message.num_layers = _DTYPES[group.dtype], group.num_layers
    message.num_kv_heads, message.head_dim = group.num_kv_heads, group.head_dim
    message.kv_scales.extend(group.kv_scales)
    return message


def spec_of(message: kv_pb2.KvLayout) -> KvSpec:
    """Returns the spec of a message. Raises Mismatch if this version does not support it."""
    num_layers = sum(len(group.layers) for group in message.groups) or message.num_layers
    if num_layers > _MAX_LAYERS:
        raise _mismatch(f"the peer has {num_layers} layers; the maximum is {_MAX_LAYERS}", "num_layers")
    groups = tuple(map(_group_of, message.groups)) or (_full_group(message),)
    if message.block_size < 1:
        raise _mismatch("the peer's KV layout has block_size=0; it must be at least 1", "block_size")
    tp_size = message.tp_size or 1
    for group in groups:
        _check_ranks(group.num_kv_heads, tp_size)
    if message.tp_rank >= tp_size:
        raise _mismatch(f"the peer has rank {message.tp_rank} of {tp_size}; it must be below tp_size", "tp_rank")
    layers = sorted(layer for group in groups for layer in group.layers)
    if layers != list(range(len(layers))):
        raise _mismatch("the peer's groups do not have each layer once, from 0 on", "groups")
    spec = KvSpec(message.model_digest, message.block_size, groups, tp_size, message.tp_rank)
    if spec.largest_layer_bytes > _MAX_BLOCK_LAYER_BYTES:
        raise _mismatch(
            f"a block of one layer has {spec.largest_layer_bytes} bytes at the peer; at most {_MAX_BLOCK_LAYER_BYTES} "
            "are moved",
            "block_size",
        )
    return spec


def check_convertible(sender: KvSpec, receiver: KvSpec) -> None:
    """Raises Mismatch, with what differs at both ends, if the sender cannot convert into the receiver's layout.

    Does not check whether these two ranks share heads.
    """
    different = list(_differences(sender, receiver))
    if different:
        at_sender, at_receiver = (
            ", ".join(f"{difference[0]}={_shown(difference[side])}" for difference in different) for side in (1, 2)
        )
        raise _mismatch(
            f"KV cannot be handed over: the prefill worker has {at_sender}, the decode worker has {at_receiver}",
            different[0][0],
        )


def _is_one_full_group(spec: KvSpec) -> bool:
    group = spec.groups[0]
    whole = len(spec.groups) == 1 and group.layers == tuple(range(group.num_layers))
    return whole and group.kind is KvKind.FULL


def _group_message(group: KvGroup) -> kv_pb2.KvGroup:
    return kv_pb2.KvGroup(
        kind=_KINDS[group.kind],
        layers=group.layers,
        dtype=_DTYPES[group.dtype],
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        window=group.window,
        kv_scales=group.kv_scales,
    )


def _full_group(message: kv_pb2.KvLayout) -> KvGroup:
    dtype = _dtype_of(message.dtype)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(message, name) < 1:
            raise _mismatch(f"the peer's KV layout has {name}=0; it must be at least 1", name)
    _check_scales(message.kv_scales, dtype, message.num_layers)
    layers = tuple(range(message.num_layers))
    scales = tuple(message.kv_scales)
    return KvGroup(KvKind.FULL, layers, dtype, message.num_kv_heads, message.head_dim, kv_scales=scales)


def _group_of(message: kv_pb2.KvGroup) -> KvGroup:
    kind = _KIND_OF.get(message.kind)
    if kind is None:
        known = ", ".join(kind.value for kind in KvKind)
        raise _mismatch(f"the peer has a group of kind number {message.kind}; this worker has {known}", "groups")
    dtype = _dtype_of(message.dtype)
    if not message.layers or message.num_kv_heads < 1 or message.head_dim < 1:
        raise _mismatch("a group of the peer has no layers, no heads or no values; it must have some of each", "groups")
    if (kind is KvKind.WINDOW) != (message.window > 0):
        raise _mismatch(
            f"a {kind.value} group of the peer has window={message.window}; above 0 is for window groups only",
            "groups",
        )
    _check_scales(message.kv_scales, dtype, len(message.layers))
    return KvGroup(
        kind,
        tuple(message.layers),
        dtype,
        message.num_kv_heads,
        message.head_dim,
        message.window,
        tuple(message.kv_scales),
    )


def _dtype_of(number: kv_pb2.KvDtype.ValueType) -> str:
    dtype = _NAMES.get(number)
    if dtype is None:
        raise _mismatch(f"the peer's KV dtype is number {number}; this worker has {', '.join(_DTYPES)}", "dtype")
    return dtype


def _check_ranks(num_heads: int, tp_size: int) -> None:
    if num_heads % tp_size and tp_size % num_heads:
        raise _mismatch(
            f"the peer's {num_heads} KV heads are on {tp_size} ranks; one of the two must divide the other", "tp_size"
        )


def _check_scales(scales: Sequence[float], dtype: str, num_layers: int) -> None:
    count, expected = len(scales), 2 * num_layers
    if count and dtype != "float8_e4m3":
        raise _mismatch(f"the peer has {count} kv_scales for {dtype}; only float8_e4m3 may have some", "kv_scales")
    if count not in (0, expected):
        raise _mismatch(f"the peer has {count} kv_scales; it must be {expected} of them, or none", "kv_scales")
    for scale in scales:
        if not 0 < scale < math.inf:
            raise _mismatch(f"the peer has a KV scale of {scale}; it must be above 0 and finite", "kv_scales")


def _differences(sender: KvSpec, receiver: KvSpec) -> Iterator[tuple[str, object, object]]:
    """Returns the name of each difference, and both values."""
    if sender.model_digest != receiver.model_digest:
        yield "model_digest", sender.model_digest, receiver.model_digest
    if len(sender.groups) != len(receiver.groups):
        yield "groups", len(sender.groups), len(receiver.groups)
        return
    for index, pair in enumerate(zip(sender.groups, receiver.groups, strict=True)):
        prefix = f"groups[{index}]." if len(sender.groups) > 1 else ""
        for name, ours, theirs in _group_differences(*pair):
            yield prefix + name, ours, theirs


def _group_differences(sender: KvGroup, receiver: KvGroup) -> Iterator[tuple[str, object, object]]:
    for name in ("kind", "num_layers", "num_kv_heads", "head_dim", "window"):
        ours, theirs = getattr(sender, name), getattr(receiver, name)
        if ours != theirs:
            yield name, ours, theirs
    if sender.num_layers == receiver.num_layers and sender.layers != receiver.layers:
        yield "layers", sender.layers, receiver.layers
    # No attention reads latents of 8 bits.
    unread = ("simulated", "float8_e4m3") if sender.kind is KvKind.LATENT else ("simulated",)
    if sender.dtype != receiver.dtype and {sender.dtype, receiver.dtype}.intersection(unread):
        yield "dtype", sender.dtype, receiver.dtype
    if sender.dtype == receiver.dtype and sender.kv_scales != receiver.kv_scales:
        yield "kv_scales", sender.kv_scales, receiver.kv_scales


def _mismatch(message: str, name: str) -> Mismatch:
    return Mismatch(message, field=f"layout.{name}", phase=types_pb2.PHASE_TRANSFER)


def _shown(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, KvKind):
        return value.value
    return [f"{number:g}" for number in value] if isinstance(value, tuple) else value
