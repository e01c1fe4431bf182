"""Weights of 2, 4 or 8 bits, packed into int32, with a scale and perhaps a zero for each group of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearOps, LinearShape, Params
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.int4 import INT4_BITS, INT4_MIDDLE, Int4Ops, Int4Rows
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import ALL, StoredTensor

WORD = 32  # bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs a linear's integers."""

    name: str
    bits: int
    group: int  # columns; 0: the whole row
    weight: StoredTensor  # of int32, along columns or, if it stands for several rows, along rows
    scale: StoredTensor
    zero: StoredTensor | None = None  # of int32, along rows; None: half of the range
    zero_plus: int = 0  # what stored zeros lack
    groups: StoredTensor | None = None  # of each column; None: columns are in the order of the groups
    order: tuple[int, ...] = ()  # the place of each of a word's integers, from the lowest bits; empty: as they are


class Grouped(PackedMethod):
    """w = (stored - zero) * scale of the column's group"""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        tensors = (packing.weight, packing.scale, packing.zero, packing.groups)
        group = f"groups of {packing.group}" if packing.group else "a scale a row"
        ordered = ", in the order of activations" if packing.groups is not None else ""
        name = f"{packing.name}, {packing.bits} bits, {group}{ordered}"
        super().__init__(name, [one for one in tensors if one is not None])
        order = packing.order or range(WORD // packing.bits)
        self._shifts = torch.tensor(order, dtype=torch.int32) * packing.bits
        self._mask = (1 << packing.bits) - 1

    def refusal(self, shape: LinearShape) -> str:
        """Returns which size is no multiple of what is packed or scaled together."""
        packing, per_word = self._packing, WORD // self._packing.bits
        if packing.group and shape.in_features % packing.group:
            return f"{shape.in_features} input features are no multiple of the group size {packing.group}"
        if packing.weight.columns > 1 and shape.in_features % per_word:
            return f"{shape.in_features} input features are no multiple of the {per_word} that a word packs"
        along_rows = packing.weight.rows > 1 or packing.zero is not None
        for part in shape.parts if along_rows else ():
            if part.rows % per_word:
                return f"{part.rows} output features are no multiple of the {per_word} that a word packs"
        return ""

    def complete(self, params: Params, shape: LinearShape) -> None:
        """Raises InvalidRequest for columns of groups that are not there."""
        packing = self._packing
        if packing.groups is None:
            return
        groups, count = params["groups"], params["scale"].shape[1]
        for part, _ in parts_of(shape):
            if int(groups.min()) < 0 or int(groups.max()) >= count:
                raise InvalidRequest(
                    f"{part.name}{packing.groups.ending} holds groups from {int(groups.min())} to "
                    f"{int(groups.max())}; there are {count} of {packing.group} columns",
                    field="model",
                )

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops of a kernel for 4 bits, if columns are in the order of their groups."""
        if self._packing.bits > INT4_BITS or self._packing.groups is not None:
            return self.on_cpu(kernels)
        return Int4Ops(kernels, self, self._int4)

    def _int4(self, params: Params, rows: slice) -> Int4Rows:
        scale, zero = params["scale"][rows], self._zero(params, rows)
        least = scale * (INT4_MIDDLE - zero)
        return Int4Rows(self._stored(params, rows), scale, least)

    def _stored(self, params: Params, rows: slice) -> Tensor:
        packing = self._packing
        packed = params["weight"][packing.weight.span(rows)]
        return self._by_rows(packed) if packing.weight.rows > 1 else self._by_columns(packed)

    def _zero(self, params: Params, rows: slice) -> Tensor | float:
        """Returns the zero of each group, or that of all."""
        packing = self._packing
        if packing.zero is None:
            return float(1 << (packing.bits - 1))
        stored = self._by_rows(params["zero"][packing.zero.span(rows)])
        return (stored + packing.zero_plus & self._mask).float()

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        packing = self._packing
        weight, scale, zero = self._stored(params, rows), params["scale"][rows], self._zero(params, rows)
        if packing.groups is not None:
            columns = params["groups"][0]
            zero = zero if isinstance(zero, float) else zero.index_select(1, columns)
            return weight.float().sub_(zero).mul_(scale.index_select(1, columns))
        grouped = weight.float().unflatten(1, (scale.shape[1], -1))  # type: ignore[no-untyped-call]
        zero = zero if isinstance(zero, float) else zero.unsqueeze(2)
        dequantized: Tensor = grouped.sub_(zero).mul_(scale.unsqueeze(2)).flatten(1)
        return dequantized

    def packed_weight(self, params: Params) -> PackedWeight:
        """Returns words along columns, or along rows in the order of AWQ. Raises Unsupported for others."""
        packing = self._packing
        along_rows = packing.weight.rows > 1
        if packing.order != (_AWQ_ORDER if along_rows else ()):
            return super().packed_weight(params)
        groups = params.get("groups")
        return PackedWeight(
            "rows_of_words" if along_rows else "words",
            params["weight"],
            self.out_features(params),
            bits=packing.bits,
            scale=params["scale"],
            group=packing.group,
            zero=params.get("zero"),
            zero_plus=packing.zero_plus,
            groups=None if groups is None else groups[0],
            bias=params.get("bias"),
        )

    def _by_columns(self, packed: Tensor) -> Tensor:
        """Returns the integers of words [rows, columns / per word]."""
        return (packed.unsqueeze(2) >> self._shifts & self._mask).flatten(1)

    def _by_rows(self, packed: Tensor) -> Tensor:
        """Returns the integers of words [rows / per word, columns]."""
        return (packed.unsqueeze(1) >> self._shifts[:, None] & self._mask).flatten(0, 1)


def columns_packed(ending: str, bits: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a weight of words along its columns."""
    return StoredTensor("weight", ending, torch.int32, columns=WORD // bits, transposed=transposed)


def group_scales(ending: str, group: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a scale for each group of a row."""
    return StoredTensor("scale", ending, torch.float32, columns=group or ALL, transposed=transposed)


def packed_zeros(ending: str, bits: int, group: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a zero for each group of a row, of words along the rows."""
    return StoredTensor("zero", ending, torch.int32, WORD // bits, group or ALL, transposed=transposed)


def column_groups(ending: str) -> StoredTensor:
    """Returns the group of each column, of all rows of a part."""
    return StoredTensor("groups", ending, torch.int32, rows=ALL)
