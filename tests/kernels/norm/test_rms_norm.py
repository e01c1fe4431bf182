"""RMSNorm against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels.norm.rms_norm import rms_norm

SMALL = [(1, 64, torch.float32), (3, 96, torch.float16)]
GRID = [
    (num_tokens, size, dtype)
    for num_tokens, size in ((1, 4096), (1000, 1024), (17, 2880), (3, 16_384))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm_equals_its_formula(case: tuple[int, int, torch.dtype], device: str, added: bool) -> None:
    num_tokens, size, dtype = case
    x, residual = (torch.randn(num_tokens, size, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(size, device=device).to(dtype)
    summed = (x + residual) if added else x
    wide = summed.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-6, residual=residual if added else None)
    assert relative_error(out, expected) <= BOUNDS[dtype]
    if added:
        assert torch.equal(residual, summed)
