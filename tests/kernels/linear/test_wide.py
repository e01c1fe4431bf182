"""The linear of fp32 weights, as exact as a product in fp32."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import cases, relative_error

SMALL = [(1, 64, 96), (3, 20, 130), (64, 60, 256)]
GRID = [(1, 64, 2048), (16, 256, 7168), (64, 64, 2048), (64, 160, 5120), (7, 8, 96)]


@pytest.mark.parametrize(("sizes", "device"), cases(SMALL, GRID))
def test_products_are_as_exact_as_in_fp32(sizes: tuple[int, int, int], device: str) -> None:
    from baton.kernels.linear.wide import multiply_wide

    torch.manual_seed(0)
    num_tokens, num_rows, size = sizes
    x = torch.randn(num_tokens, size, device=device).bfloat16()
    weight = torch.randn(num_rows, size, device=device)
    found = multiply_wide(x, weight)
    assert found.dtype == torch.float32
    assert relative_error(found, x.double() @ weight.double().t()) < 1e-6
