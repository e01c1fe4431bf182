"""Weights in GGUF's blocks, which are kept as the file has them."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from baton.worker.quantization.base import Finish, LinearOps, LinearShape, Params, Source
from baton.worker.quantization.neighbours import Kernels
from baton.worker.quantization.quantized.gguf_blocks import BlockType
from baton.worker.quantization.quantized.int4 import INT4_MIDDLE, Int4Ops, Int4Rows
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import StoredTensor


class GgufBlocks(PackedMethod):
    """Rows of blocks"""

    def __init__(self, name: str, kind: BlockType) -> None:
        columns = Fraction(kind.num_values, kind.num_bytes)  # of a byte
        super().__init__(f"gguf {name}", [StoredTensor("weight", ".weight", torch.uint8, columns=columns)])
        self._kind = kind

    def refusal(self, shape: LinearShape) -> str:
        if shape.in_features % self._kind.num_values:
            return f"{shape.in_features} input features are no multiple of the {self._kind.num_values} of a block"
        return ""

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills the rows of each part with their bytes."""
        for part, rows in parts_of(shape):
            source(f"{part.name}.weight", (part.rows, shape.in_features), params["weight"][rows])
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
        return partial(self._finish, params, shape)

    def on_bfloat16(self, kernels: Kernels) -> LinearOps:
        """Returns ops of a kernel for 4 bits, if blocks can be read so."""
        return self.on_cpu(kernels) if self._kind.int4 is None else Int4Ops(kernels, self, self._int4)

    def _int4(self, params: Params, rows: slice) -> Int4Rows:
        packed = params["weight"][rows]
        assert self._kind.int4 is not None, "on_bfloat16 has seen it"
        stored, scale, least = self._kind.int4(packed.view(-1, self._kind.num_bytes))
        count = len(packed)
        return Int4Rows(stored.view(count, -1), scale.view(count, -1), (least + INT4_MIDDLE * scale).view(count, -1))

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        packed = params["weight"][rows]
        return self._kind.dequantize(packed.view(-1, self._kind.num_bytes)).view(len(packed), -1)
