"""Weights in GGUF's blocks, which are kept as the file has them."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, Source
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.gguf_blocks import BlockType
from baton.worker.quantization.quantized.int4 import INT4_BITS, INT4_LEAST_GROUP, INT4_MIDDLE, Int4Ops, Int4Rows
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import StoredTensor


class GgufBlocks(PackedMethod):
    """Rows of blocks"""

    def __init__(self, name: str, kind: BlockType) -> None:
        columns = Fraction(kind.num_values, kind.num_bytes)  # of a byte
        super().__init__(f"gguf {name}", [StoredTensor("weight", ".weight", torch.uint8, columns=columns)])
        self._kind = kind

    def refusal(self, shape: LinearShape) -> str:
        return self._kind.refusal(shape.in_features)

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills the rows of each part with their bytes."""
        for part, rows in parts_of(shape):
            source(f"{part.name}.weight", (part.rows, shape.in_features), params["weight"][rows])
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
        return partial(self._finish, params, shape)

    def complete(self, params: Params, shape: LinearShape) -> None:
        """Raises InvalidRequest for scales that are not finite."""
        for part, rows in parts_of(shape):
            self._kind.check(params["weight"][rows], f"{part.name}.weight")

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops of a kernel for 4 bits, if blocks can be read so."""
        has_kernel = self._kind.bits == INT4_BITS and self._kind.group >= INT4_LEAST_GROUP
        return Int4Ops(kernels, self, self._int4) if has_kernel else self.on_cpu(kernels)

    def _int4(self, params: Params, rows: slice) -> Int4Rows:
        packed = params["weight"][rows]
        stored, scale, least = self._kind.split(packed.view(-1, self._kind.num_bytes))
        if least is None:
            least = -self._kind.middle * scale
        count = len(packed)
        return Int4Rows(stored.view(count, -1), scale.view(count, -1), (least + INT4_MIDDLE * scale).view(count, -1))

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        packed = params["weight"][rows]
        return self._kind.dequantize(packed.view(-1, self._kind.num_bytes)).view(len(packed), -1)
