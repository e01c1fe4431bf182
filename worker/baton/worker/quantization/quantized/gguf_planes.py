"""Weights of GGUF's blocks as the GPU's kernels read them: values packed alone, and a scale and a zero for each group.

Each value stays what it is: scales are kept in fp32, since those of k-quants are products.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from baton.kernels.packed.weight import PackedWeight
from baton.worker.quantization.base import Finish, LinearShape, Params, Source
from baton.worker.quantization.quantized.gguf_blocks import BlockType
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import StoredTensor

_WORD = 32  # bits
_BYTE = 8
_ROWS_AT_ONCE = 1024  # split


class Planes(NamedTuple):
    """w = (stored - zero) * scale; without zeros, words hold 2^(bits - 1) more than the value."""

    stored: Tensor  # [rows, columns] int8, or [rows, columns * bits / 32] int32
    scale: Tensor  # [rows, num_groups] fp32
    zero: Tensor | None  # as scale


class GgufPlanes(PackedMethod):
    """Rows of values, of scales and of zeros."""

    def __init__(self, name: str, kind: BlockType) -> None:
        self._kind = kind
        self._is_words = kind.bits < _BYTE
        weight = StoredTensor("weight", ".weight", torch.int8)
        if self._is_words:
            weight = StoredTensor("weight", ".weight", torch.int32, columns=_WORD // kind.bits)
        factors = ["scale", "zero"] if kind.has_least else ["scale"]
        beside = [StoredTensor(factor, f".{factor}", torch.float32, columns=kind.group) for factor in factors]
        super().__init__(f"gguf {name}", [weight, *beside])

    def refusal(self, shape: LinearShape) -> str:
        return self._kind.refusal(shape.in_features)

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Reads the blocks of each part beside the parameters, which the finish fills."""
        staged = []
        for part, rows in parts_of(shape):
            num_bytes = shape.in_features // self._kind.num_values * self._kind.num_bytes
            blocks = torch.empty(part.rows, num_bytes, dtype=torch.uint8, device=params["weight"].device)
            source(f"{part.name}.weight", (part.rows, shape.in_features), blocks)
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
            staged.append((part.name, rows, blocks))
        return partial(self._complete, params, staged)

    def _complete(self, params: Params, staged: list[tuple[str, slice, Tensor]]) -> None:
        while staged:
            name, rows, blocks = staged.pop()
            self._kind.check(blocks, f"{name}.weight")
            for start in range(0, len(blocks), _ROWS_AT_ONCE):
                some = blocks[start : start + _ROWS_AT_ONCE]
                into = slice(rows.start + start, rows.start + start + len(some))
                for param, values in self._planes(some)._asdict().items():
                    if values is not None:
                        params["weight" if param == "stored" else param][into] = values

    def _planes(self, rows: Tensor) -> Planes:
        """Returns the planes of rows of blocks."""
        kind = self._kind
        split = kind.split(rows.view(-1, kind.num_bytes))
        stored, scale = (one.view(len(rows), -1) for one in split[:2])
        zero = None
        if split.least is not None:
            stored, scale, zero = _with_zero(stored, scale, split.least.view(len(rows), -1), kind.group)
        if self._is_words:
            middle = 0 if zero is not None else (1 << kind.bits - 1) - kind.middle
            return Planes(_words(stored + middle, kind.bits), scale, zero)
        return Planes(stored.to(torch.int8) - kind.middle, scale, zero)

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        stored = params["weight"][rows]
        values = (_values(stored, self._kind.bits) if self._is_words else stored).float()
        if self._is_words and "zero" not in params:
            values -= 1 << self._kind.bits - 1
        grouped = values.unflatten(1, (params["scale"].shape[1], -1))  # type: ignore[no-untyped-call]
        if "zero" in params:
            grouped -= params["zero"][rows].unsqueeze(2)
        found: Tensor = grouped.mul_(params["scale"][rows].unsqueeze(2)).flatten(1)
        return found

    def packed_weight(self, params: Params) -> PackedWeight:
        numbers: Literal["words", "bytes"] = "words" if self._is_words else "bytes"
        return PackedWeight(
            numbers,
            params["weight"],
            self.out_features(params),
            bits=self._kind.bits,
            scale=params["scale"],
            group=self._kind.group,
            zero=params.get("zero"),
            bias=params.get("bias"),
        )


def _with_zero(stored: Tensor, scale: Tensor, least: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what is stored, scales, and zeros: -least / scale.

    A group whose scale is 0 has its least value everywhere: it gets that as its scale, and values of 0.
    """
    is_even = scale == 0
    zero = torch.where(is_even, -least.sign(), -least / scale)
    stored = stored.masked_fill(is_even.repeat_interleave(group, 1), 0)
    return stored, torch.where(is_even, least.abs(), scale), zero


def _words(values: Tensor, bits: int) -> Tensor:
    """Returns values [rows, columns] of so many bits in words of 32, the first in the lowest bits."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=values.device)
    shifted = values.view(len(values), -1, _WORD // bits).int() << shifts
    return shifted.sum(2, dtype=torch.int32)


def _values(words: Tensor, bits: int) -> Tensor:
    """Returns the values [rows, columns] of words."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1)
