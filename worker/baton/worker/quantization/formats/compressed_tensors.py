"""compressed-tensors: FP8, INT8 (W8A8), packed integers (W4A16, W8A16), NVFP4 and MXFP4, a scheme for each target.

Activations are not rounded: their scales are for kernels of 8 and 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.worker.quantization.formats import settings as read
from baton.worker.quantization.formats.base import FormatOfLinears
from baton.worker.quantization.formats.modules import Modules
from baton.worker.quantization.quantized.fp4 import MX_GROUP, NV_GROUP, MxFp4, NvFp4
from baton.worker.quantization.quantized.grouped import (
    Grouped,
    Packing,
    columns_packed,
    group_scales,
    packed_zeros,
)
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.ordered import Ordered
from baton.worker.quantization.quantized.scaled import FP8, Scaled

_ANY_LINEAR, _ANY_TABLE = "Linear", "Embedding"
_STRATEGIES = ("tensor", "channel", "group", "block")
_PACKED, _SCALE, _ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"


@dataclass(frozen=True, slots=True)
class _Group:
    """Modules, and how their weights are stored; None: as usual."""

    targets: Modules
    any_linear: bool
    any_table: bool
    method: PackedMethod | None


class CompressedTensors(FormatOfLinears):
    """`NAME.weight` or `NAME.weight_packed`, `NAME.weight_scale`, and what else the scheme of its group has."""

    covers_heads = covers_tables = True
    unused = (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
        ".weight_shape",
        ".q_scale",
    )

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if read.inner(settings, "sparsity_config"):
            raise ValueError("sparsity_config is given; it must be absent")
        if read.inner(settings, "transform_config"):
            raise ValueError("transform_config is given; it must be absent")
        groups = read.inner(settings, "config_groups")
        if not groups:
            raise ValueError("config_groups is missing; it must describe at least one group of modules")
        self._left_out = Modules(read.names(settings, "ignore"))
        self._groups = [_group(name, groups, str(settings.get("format"))) for name in groups]

    def packed(self, name: str) -> PackedMethod | None:
        if self._left_out.has(name):
            return None
        for group in self._groups:
            if group.targets.has(name):
                return group.method
        return next((group.method for group in self._groups if group.any_linear), None)

    def packed_table(self, name: str) -> PackedMethod | None:
        if self._left_out.has(name):
            return None
        return next((group.method for group in self._groups if group.any_table or group.targets.has(name)), None)


def _group(name: str, groups: Mapping[str, Any], format_name: str) -> _Group:
    group = read.inner(groups, name) or {}
    targets = read.names(group, "targets")
    try:
        weights = read.inner(group, "weights")
        method = None if weights is None else _method(weights, str(group.get("format") or format_name))
    except ValueError as error:
        raise ValueError(f"config_groups: {name}: {error}") from error
    named = Modules([one for one in targets if one not in (_ANY_LINEAR, _ANY_TABLE)])
    return _Group(named, _ANY_LINEAR in targets, _ANY_TABLE in targets, method)


def _method(weights: Mapping[str, Any], format_name: str) -> PackedMethod:
    made = _FORMATS.get(format_name)
    if made is None:
        raise ValueError(f"format is {format_name!r}; it must be one of {', '.join(_FORMATS)}")
    return made(weights)


def _scaled(weights: Mapping[str, Any]) -> PackedMethod:
    read.choice(weights, "num_bits", (8,))
    dtype = FP8 if read.choice(weights, "type", ("float", "int"), "int") == "float" else torch.int8
    strategy = read.choice(weights, "strategy", _STRATEGIES, "tensor")
    block = None
    if strategy == "group":
        block = (1, read.group_size(weights))
    elif strategy == "block" and (block := read.block(weights, "block_structure")) is None:
        raise ValueError("block_structure is missing; it must be two positive integers")
    symmetric = read.flag(weights, "symmetric", default=True)
    return Scaled(dtype, block, one_a_part=strategy == "tensor", zero_ending="" if symmetric else _ZERO)


def _packed_integers(weights: Mapping[str, Any]) -> PackedMethod:
    bits = read.choice(weights, "num_bits", (2, 4, 8))
    read.choice(weights, "type", ("int",), "int")
    strategy = read.choice(weights, "strategy", ("channel", "group"), "group")
    group = read.group_size(weights) if strategy == "group" else 0
    order = read.choice(weights, "actorder", ("group", "dynamic", "weight", "static", "none"), "none")
    zero = None if read.flag(weights, "symmetric", default=True) else packed_zeros(_ZERO, bits, group)
    packing = Packing("packed integers", bits, group, columns_packed(_PACKED, bits), group_scales(_SCALE, group), zero)
    return Ordered(packing, ".weight_g_idx") if order in ("group", "dynamic") else Grouped(packing)


def _fp4(weights: Mapping[str, Any], group: int, method: PackedMethod) -> PackedMethod:
    read.choice(weights, "num_bits", (4,))
    read.choice(weights, "type", ("float",))
    read.choice(weights, "group_size", (group,), group)
    return method


_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], PackedMethod]] = {
    "float-quantized": _scaled,
    "int-quantized": _scaled,
    "naive-quantized": _scaled,
    "pack-quantized": _packed_integers,
    "nvfp4-pack-quantized": lambda weights: _fp4(
        weights, NV_GROUP, NvFp4(_PACKED, _SCALE, ".weight_global_scale", global_scale="divides")
    ),
    "mxfp4-pack-quantized": lambda weights: _fp4(weights, MX_GROUP, MxFp4(_PACKED, _SCALE)),
}

FORMAT = CompressedTensors
