"""Weights of 2, 4 or 8 bits, packed into int32, with a scale and perhaps a zero for each group of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.worker.quantization.base import LinearOps, LinearShape, Params
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.int4 import INT4_BITS, INT4_MIDDLE, Int4Ops, Int4Rows
from baton.worker.quantization.quantized.method import PackedMethod
from baton.worker.quantization.quantized.tensors import ALL, StoredTensor

WORD = 32  # bits


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs a linear's integers."""

    name: str
    bits: int
    group: int  # columns; 0: the whole row
    weight: StoredTensor  # of int32, along columns
    scale: StoredTensor
    zero: StoredTensor | None = None  # of int32, along rows; None: half of the range
    zero_plus: int = 0  # what stored zeros lack


class Grouped(PackedMethod):
    """w = (stored - zero) * scale of the column's group"""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        tensors = (packing.weight, packing.scale, packing.zero)
        group = f"groups of {packing.group}" if packing.group else "a scale a row"
        name = f"{packing.name}, {packing.bits} bits, {group}"
        super().__init__(name, [one for one in tensors if one is not None])
        self._shifts = torch.arange(0, WORD, packing.bits, dtype=torch.int32)
        self._mask = (1 << packing.bits) - 1

    def refusal(self, shape: LinearShape) -> str:
        """Returns which size is no multiple of what is packed or scaled together."""
        packing, per_word = self._packing, WORD // self._packing.bits
        if packing.group and shape.in_features % packing.group:
            return f"{shape.in_features} input features are no multiple of the group size {packing.group}"
        if shape.in_features % per_word:
            return f"{shape.in_features} input features are no multiple of the {per_word} that a word packs"
        for part in shape.parts if packing.zero is not None else ():
            if part.rows % per_word:
                return f"{part.rows} output features are no multiple of the {per_word} that a word packs"
        return ""

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops of a kernel for 4 bits."""
        return self.on_cpu(kernels) if self._packing.bits > INT4_BITS else Int4Ops(kernels, self, self._int4)

    def _int4(self, params: Params, rows: slice) -> Int4Rows:
        scale, zero = params["scale"][rows], self._zero(params, rows)
        least = scale * (INT4_MIDDLE - zero)
        return Int4Rows(self._stored(params, rows), scale, least)

    def _stored(self, params: Params, rows: slice) -> Tensor:
        return integers_of(params["weight"][rows], self._packing.bits)

    def _zero(self, params: Params, rows: slice) -> Tensor | float:
        """Returns the zero of each group, or that of all."""
        packing = self._packing
        if packing.zero is None:
            return float(1 << (packing.bits - 1))
        stored = self._by_rows(params["zero"][packing.zero.span(rows)])
        return (stored + packing.zero_plus & self._mask).float()

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        weight, scale, zero = self._stored(params, rows), params["scale"][rows], self._zero(params, rows)
        grouped = weight.float().unflatten(1, (scale.shape[1], -1))  # type: ignore[no-untyped-call]
        zero = zero if isinstance(zero, float) else zero.unsqueeze(2)
        dequantized: Tensor = grouped.sub_(zero).mul_(scale.unsqueeze(2)).flatten(1)
        return dequantized

    def packed_weight(self, params: Params) -> PackedWeight:
        packing = self._packing
        return PackedWeight(
            "words",
            params["weight"],
            self.out_features(params),
            bits=packing.bits,
            scale=params["scale"],
            group=packing.group,
            zero=params.get("zero"),
            zero_plus=packing.zero_plus,
            bias=params.get("bias"),
        )

    def _by_rows(self, packed: Tensor) -> Tensor:
        """Returns the integers of words [rows / per word, columns]."""
        return (packed.unsqueeze(1) >> self._shifts[:, None] & self._mask).flatten(0, 1)


def integers_of(words: Tensor, bits: int) -> Tensor:
    """Returns the integers [rows, columns] of words [rows, columns / per word], the first in the lowest bits."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)


def words_of(integers: Tensor, bits: int) -> Tensor:
    """Returns the words of integers [rows, columns]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=integers.device)
    return (integers.view(len(integers), -1, WORD // bits) << shifts).sum(2, dtype=torch.int32)


def columns_packed(ending: str, bits: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a weight of words along its columns."""
    return StoredTensor("weight", ending, torch.int32, columns=WORD // bits, transposed=transposed)


def group_scales(ending: str, group: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a scale for each group of a row."""
    return StoredTensor("scale", ending, torch.float32, columns=group or ALL, transposed=transposed)


def packed_zeros(ending: str, bits: int, group: int, *, transposed: bool = False) -> StoredTensor:
    """Returns a zero for each group of a row, of words along the rows."""
    return StoredTensor("zero", ending, torch.int32, WORD // bits, group or ALL, transposed=transposed)
