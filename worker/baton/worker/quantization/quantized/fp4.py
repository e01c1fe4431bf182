"""Weights of 4-bit floats (e2m1), two a byte, with a scale of 8 bits for each group of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.packed.weight import PackedWeight
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearShape, Params
from baton.worker.quantization.quantized.method import PackedMethod, parts_of
from baton.worker.quantization.quantized.tensors import ALL, StoredTensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP, NV_GROUP = 32, 16
_NO_EXPONENT = 255  # NaN

_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)


def pairs_of(values: Sequence[float]) -> Tensor:
    """Returns the two numbers of each byte, [256, 2]. The low half comes first."""
    return torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)])


_PAIRS = pairs_of(E2M1)


class MxFp4(PackedMethod):
    """w = e2m1 * 2^(exponent - 127), a group of 32"""

    def __init__(self, weight_ending: str, scale_ending: str) -> None:
        super().__init__(
            "mxfp4",
            [
                StoredTensor("weight", weight_ending, torch.uint8, columns=2),
                StoredTensor("scale", scale_ending, torch.uint8, columns=MX_GROUP),
            ],
        )
        self._scale_ending = scale_ending

    def refusal(self, shape: LinearShape) -> str:
        return _refusal(shape, MX_GROUP)

    def complete(self, params: Params, shape: LinearShape) -> None:
        """Raises InvalidRequest for exponents that mean NaN."""
        for part, rows in parts_of(shape):
            if count := int((params["scale"][rows] == _NO_EXPONENT).sum()):
                raise InvalidRequest(
                    f"{part.name}{self._scale_ending} holds {count} exponents that mean NaN: "
                    "the checkpoint is damaged; download it again",
                    field="model",
                )

    def packed_weight(self, params: Params) -> PackedWeight:
        return PackedWeight(
            "e2m1", params["weight"], len(params["weight"]), 4, params["scale"], group=MX_GROUP, bias=params.get("bias")
        )

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        scale = functional.embedding(params["scale"][rows].int(), _POWERS.unsqueeze(1)).squeeze(2)
        return scaled_pairs(params["weight"][rows], _PAIRS, scale)


class NvFp4(PackedMethod):
    """w = e2m1 * e4m3 scale of a group of 16 * a part's scale, or divided by it"""

    def __init__(
        self,
        weight_ending: str,
        scale_ending: str,
        global_ending: str,
        *,
        global_scale: Literal["multiplies", "divides"],
    ) -> None:
        super().__init__(
            "nvfp4",
            [
                StoredTensor("weight", weight_ending, torch.uint8, columns=2),
                StoredTensor("scale", scale_ending, torch.float8_e4m3fn, columns=NV_GROUP),
                StoredTensor("global_scale", global_ending, torch.float32, columns=ALL, one_a_part=True),
            ],
        )
        self._divides = global_scale == "divides"
        self._global_ending = global_ending

    def refusal(self, shape: LinearShape) -> str:
        return _refusal(shape, NV_GROUP)

    def complete(self, params: Params, shape: LinearShape) -> None:
        """Raises InvalidRequest for a global scale that is not above 0."""
        for part, rows in parts_of(shape):
            value = float(params["global_scale"][rows.start])
            if value <= 0:
                raise InvalidRequest(f"{part.name}{self._global_ending} is {value}; it must be above 0", field="model")

    def packed_weight(self, params: Params) -> PackedWeight:
        return PackedWeight(
            "e2m1",
            params["weight"],
            len(params["weight"]),
            4,
            params["scale"],
            group=NV_GROUP,
            row_scale=params["global_scale"],
            divides=self._divides,
            bias=params.get("bias"),
        )

    def dequantized(self, params: Params, rows: slice) -> Tensor:
        scale, part_scale = params["scale"][rows].float(), params["global_scale"][rows]
        scale = scale / part_scale if self._divides else scale * part_scale
        return scaled_pairs(params["weight"][rows], _PAIRS, scale)


def scaled_pairs(packed: Tensor, pairs: Tensor, scale: Tensor) -> Tensor:
    """Returns the values of bytes [rows, columns / 2] by a table of pairs, times the scale of their group."""
    values = functional.embedding(packed.int(), pairs).flatten(1)
    grouped = values.unflatten(1, (scale.shape[1], -1))  # type: ignore[no-untyped-call]
    dequantized: Tensor = grouped.mul_(scale.unsqueeze(2)).flatten(1)
    return dequantized


def _refusal(shape: LinearShape, group: int) -> str:
    if shape.in_features % group:
        return f"{shape.in_features} input features are no multiple of the group size {group}"
    return ""
