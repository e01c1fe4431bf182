"""Weights of 8 bits with scales: one a tensor, a row, a group of a row, or a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.packed.weight import Numbers, PackedWeight
from baton.kernels.reference.kv.quantization import floats_of
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearOps, LinearShape, Params
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.int4 import Int8Ops
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import ALL, StoredTensor

FP8 = torch.float8_e4m3fn
_FP8_NAN = 0x7F  # without its sign
_WEIGHT_AND_SCALE = 2
_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.int8: "int8"}


class Scaled(PackedMethod):
    """w = (stored - zero) * scale"""

    def __init__(
        self,
        dtype: torch.dtype,
        block: tuple[int, int] | None = None,
        *,
        one_a_part: bool = False,
        scale_ending: str = ".weight_scale",
        zero_ending: str = "",
    ) -> None:
        """`block`: rows and columns of a scale; None: a row, or `one_a_part`. `zero_ending`: empty without zeros."""
        self._block = block
        self._is_fp8 = dtype is FP8
        rows, columns = block or (1, ALL)
        tensors = [
            StoredTensor("weight", ".weight", dtype),
            StoredTensor("scale", scale_ending, torch.float32, rows, columns, one_a_part=one_a_part),
        ]
        if zero_ending:
            tensors.append(StoredTensor("zero", zero_ending, torch.int8, rows, columns, one_a_part=one_a_part))
        super().__init__(f"{_NAMES[dtype]} with {_scales(block, one_a_part)}", tensors)

    def complete(self, params: Params, shape: LinearShape) -> None:
        """Raises InvalidRequest for values that are not numbers."""
        for part, rows in parts_of(shape) if self._is_fp8 else ():
            if count := int((params["weight"][rows].view(torch.uint8) & _FP8_NAN == _FP8_NAN).sum()):
                raise InvalidRequest(
                    f"{part.name}.weight holds {count} values that are not numbers: the checkpoint is damaged; "
                    "download it again",
                    field="model",
                )

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops of a kernel for int8, if each row has a scale and no zero."""
        if self._is_fp8 or self._block is not None or len(self._tensors) > _WEIGHT_AND_SCALE:
            return self.on_cpu(kernels)
        return Int8Ops(kernels, self)

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        weight = _floats(params["weight"][rows])
        if "zero" in params:
            weight.sub_(self._spread(params["zero"], rows, weight).float())
        return weight.mul_(self._spread(params["scale"], rows, weight))

    def packed_weight(self, params: Params) -> PackedWeight:
        """Returns numbers of 8 bits, with scales of rows where neither blocks nor zeros need a finer one."""
        stored = params["weight"]
        numbers: Numbers = "e4m3" if self._is_fp8 else "bytes"
        if self._block is None and "zero" not in params:
            return PackedWeight(numbers, stored, len(stored), row_scale=params["scale"], bias=params.get("bias"))
        rows, columns = self._block or (1, 0)
        return PackedWeight(
            numbers,
            stored,
            len(stored),
            scale=params["scale"],
            scale_rows=rows,
            group=columns,
            zero=params.get("zero"),
            bias=params.get("bias"),
        )

    def _spread(self, values: Tensor, rows: slice, like: Tensor) -> Tensor:
        """Returns the values of a weight's rows, which broadcast over it."""
        if self._block is None:
            return values[rows]
        high, wide = self._block
        mine = values[rows.start // high : -(-rows.stop // high)]
        if high > 1:
            mine = mine.repeat_interleave(high, 0)[: len(like)]
        return mine.repeat_interleave(wide, 1)[:, : like.shape[1]]


def _floats(stored: Tensor) -> Tensor:
    """Returns the stored numbers in fp32."""
    if stored.dtype is not FP8:
        return stored.float()
    return floats_of(stored)


def _scales(block: Sequence[int] | None, one_a_part: bool) -> str:
    if block is None:
        return "a scale a tensor" if one_a_part else "a scale a row"
    return f"groups of {block[1]}" if block[0] == 1 else f"blocks of {block[0]}x{block[1]}"
