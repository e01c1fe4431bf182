"""Weights of bitsandbytes: 4 bits of a table with a scale for each 64 values, which may be stored in 8 bits; int8."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.packed.weight import Numbers, PackedWeight
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import Finish, LinearShape, Params, Source
from baton.worker.quantization.quantized.fp4 import pairs_of, scaled_pairs
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.scaled import Scaled
from baton.worker.quantization.quantized.tensors import StoredTensor, check_finite

BLOCK = 64  # values of a scale
_NESTED_BLOCK = 256  # scales of a scale of scales
_INT8_RANGE = 127
TABLES: Mapping[str, Sequence[float]] = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": tuple(sign * value / 12 for sign in (1.0, -1.0) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}


class FourBits(PackedMethod):
    """w = table[stored] * scale of 64 values; `nested`: scale = code[stored scale] * scale of 256 scales + offset"""

    def __init__(self, kind: str, *, nested: bool) -> None:
        super().__init__(
            f"bitsandbytes {kind}",
            [
                StoredTensor("weight", ".weight", torch.uint8, columns=2),
                StoredTensor("scale", ".weight.absmax", torch.float32, columns=BLOCK),
            ],
        )
        self._numbers: Numbers = "nf4" if kind == "nf4" else "fp4"
        self._pairs = pairs_of(TABLES[kind])
        self._nested = nested
        self.state_ending = f".weight.quant_state.bitsandbytes__{kind}"

    def refusal(self, shape: LinearShape) -> str:
        if shape.in_features % BLOCK:
            return f"{shape.in_features} input features are no multiple of the {BLOCK} that share a scale"
        return ""

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        return scaled_pairs(params["weight"][rows], self._pairs, params["scale"][rows])

    def packed_weight(self, params: Params) -> PackedWeight:
        weight, bias = params["weight"], params.get("bias")
        return PackedWeight(self._numbers, weight, len(weight), 4, params["scale"], group=BLOCK, bias=bias)

    def load(self, params: Params, shape: LinearShape, source: Source) -> Finish:
        """Fills the rows of each part, whose tensors are flat in the checkpoint, and whose bytes have the first of two
        numbers in the high half."""
        staged = []
        for part, rows in parts_of(shape):
            weight, scale = params["weight"][rows], params["scale"][rows]
            source(f"{part.name}.weight", (weight.numel(), 1), weight)
            if shape.bias:
                source(f"{part.name}.bias", (part.rows,), params["bias"][rows])
            beside = self._beside(scale)
            for ending, one in beside.items():
                source(part.name + ending, (one.numel(),), one)
            staged.append((part.name, scale, beside))
        return partial(self._complete, params["weight"], staged)

    def _beside(self, scale: Tensor) -> dict[str, Tensor]:
        """Returns what is read besides the weight, by the ending of its name."""
        empty = partial(torch.empty, device=scale.device)
        if not self._nested:
            return {self.state_ending: empty(1), ".weight.absmax": scale}
        return {
            self.state_ending: empty(1),
            ".weight.absmax": empty(scale.numel(), dtype=torch.uint8),
            ".weight.nested_absmax": empty(-(-scale.numel() // _NESTED_BLOCK)),
            ".weight.nested_quant_map": empty(256),
        }

    def _complete(self, weight: Tensor, staged: list[tuple[str, Tensor, dict[str, Tensor]]]) -> None:
        weight.copy_(weight >> 4 | weight << 4)
        while staged:
            name, scale, beside = staged.pop()
            if self._nested:
                codes = beside[".weight.nested_quant_map"].index_select(0, beside[".weight.absmax"].int())
                outer = beside[".weight.nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(codes)]
                scale.copy_((codes * outer + beside[self.state_ending]).view(scale.shape))
            check_finite(scale, f"{name}.weight.absmax")


class Int8(Scaled):
    """w = stored * scale of the row / 127"""

    def __init__(self) -> None:
        super().__init__(torch.int8, scale_ending=".SCB")
        self._name = "bitsandbytes int8"

    def complete(self, params: Params, shape: LinearShape) -> None:
        params["scale"].div_(_INT8_RANGE)


def offset_in(data: Tensor, name: str, kind: str, *, nested: bool) -> Tensor:
    """Returns the offset of scales that a tensor of JSON states. Raises InvalidRequest for other blocks than ours."""
    expected: dict[str, object] = {"quant_type": kind, "blocksize": BLOCK}
    if nested:
        expected["nested_blocksize"] = _NESTED_BLOCK
    try:
        state: Any = json.loads(bytes(data.tolist()))
        found = {key: state[key] for key in expected}
        offset = float(state["nested_offset"]) if nested else 0.0
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{name} is no state of bitsandbytes, in JSON: {error!r}", field="model") from error
    for key, value in expected.items():
        if found[key] != value:
            raise InvalidRequest(f"{name}: {key} is {found[key]!r}; it must be {value}", field="model")
    return torch.tensor([offset])
