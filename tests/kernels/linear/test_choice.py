"""The kernels that are listed of a packed weight are those that products take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.engine.packed.linears import packed_linear

from baton.kernels.linear.quantized.choice import MANY, LinearKernel, kernel_for, kernel_ranges
from baton.kernels.packed.weight import PackedWeight

SIZE = 512
FIRST = {
    "compressed-fp8-channel": (1, 2, 33, 65),
    "fp8-blocks-across-parts": (1, 2, 33, 129),
    "awq": (1, 2, MANY),
}


def weight_of(name: str) -> PackedWeight:
    linear = packed_linear(name, (SIZE,), SIZE, torch.float16, "cpu")
    return linear.method.packed_weight(linear.params)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("name", FIRST)
def test_each_range_begins_where_its_kernel_is_first_taken(name: str) -> None:
    weight = weight_of(name)
    ranges = list(kernel_ranges(weight, SIZE, has_scaled_mm=True))
    assert tuple(first for first, _ in ranges) == FIRST[name]
    for (first, kernel), (end, _) in pairwise([*ranges, (4096, None)]):
        for tokens in range(first, end):
            assert kernel_for(tokens, weight, SIZE, has_scaled_mm=True) is kernel, tokens


def test_what_pytorchs_product_does_not_take_goes_to_ours() -> None:
    blocks, rows = weight_of("fp8-blocks-across-parts"), weight_of("compressed-fp8-channel")
    assert kernel_for(144, blocks, SIZE - 128, has_scaled_mm=True) is LinearKernel.ROUNDED
    assert kernel_for(144, blocks, SIZE, has_scaled_mm=False) is LinearKernel.ROUNDED
    assert kernel_for(144, blocks, SIZE, is_half=False, has_scaled_mm=True) is LinearKernel.MATRIX
    assert kernel_for(144, rows, SIZE, has_scaled_mm=True, batch_invariant=True) is LinearKernel.INVARIANT
