"""Rows of packed matrices, in every way that kernels read them."""

from __future__ import annotations

import pytest
import torch
from support.engine.packed.linears import packed_linear
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels.linear.quantized.take_rows import take_rows

NAMES = [
    "compressed-fp8-channel",
    "fp8-blocks-across-parts",
    "compressed-int8-zeros",
    "compressed-w4a16-zeros",
    "compressed-w4a16-order",
    "compressed-mxfp4",
    "compressed-nvfp4",
    "bitsandbytes-nf4",
]
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("name", "device"), cases(NAMES, NAMES))
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_those_that_are_meant(name: str, device: str, dtype: torch.dtype) -> None:
    rows, columns = (40, 320) if device == "cpu" else (2056, 1088)
    linear = packed_linear(name, (rows,), columns, dtype, device)
    weight = linear.method.packed_weight(linear.params)  # type: ignore[attr-defined]
    for kind in (torch.int32, torch.int64):
        ids = torch.tensor([rows - 1, 0, 9, 0, 17], device=device, dtype=kind)
        found = take_rows(weight, ids, columns, dtype)
        assert found.dtype is dtype
        assert relative_error(found, linear.weight[ids.long()]) <= BOUNDS[dtype]
