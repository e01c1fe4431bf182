"""LayerNorm against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels import reference
from baton.kernels.norm.layer_norm import layer_norm

SMALL = [(1, 64, torch.float32), (6, 96, torch.float16)]
GRID = [
    (num_rows, size, dtype)
    for num_rows, size in ((1, 4096), (1000, 1024), (18, 2880), (2, 16_384))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm_equals_its_formula(
    case: tuple[int, int, torch.dtype], device: str, added: bool, biased: bool
) -> None:
    num_rows, size, dtype = case
    x, residual = (torch.randn(num_rows, size, device=device).to(dtype) + 3 for _ in range(2))
    weight, bias = (torch.rand(size, device=device).to(dtype) for _ in range(2))
    summed = (x + residual) if added else x
    wide = summed.double()
    centered = wide - wide.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if biased:
        expected += bias.double()
    for op in (layer_norm, reference.layer_norm):
        old = residual.clone()
        out = op(x, weight, bias if biased else None, 1e-5, residual=old if added else None)
        assert relative_error(out, expected) <= BOUNDS[dtype]
        if added:
            assert torch.equal(old, summed)
            again = op(x, weight, bias if biased else None, 1e-5, residual=residual.clone(), keep_sum=False)
            assert torch.equal(again, out)


@pytest.mark.parametrize(("case", "device"), cases(SMALL[1:], GRID[6:9]))
def test_rows_take_weights_in_turns(case: tuple[int, int, torch.dtype], device: str) -> None:
    num_rows, size, dtype = case
    x, weight = torch.randn(num_rows, size, device=device).to(dtype), torch.rand(3, size, device=device).to(dtype)
    found = [op(x, weight, None, 1e-5) for op in (layer_norm, reference.layer_norm)]
    for row in range(num_rows):
        expected = reference.layer_norm(x[row : row + 1].double(), weight[row % 3].double(), None, 1e-5)
        assert all(relative_error(out[row : row + 1], expected) <= BOUNDS[dtype] for out in found)
