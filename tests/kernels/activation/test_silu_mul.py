"""The SwiGLU gate against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels import reference
from baton.kernels.activation.silu_mul import silu_mul

SMALL = [(1, 64, torch.float32), (3, 2056, torch.float16)]
GRID = [
    (num_tokens, size, dtype)
    for num_tokens, size in ((1, 12_288), (1000, 3072), (17, 2047))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_silu_mul_equals_its_formula(case: tuple[int, int, torch.dtype], device: str) -> None:
    num_tokens, size, dtype = case
    gate_up = (4 * torch.randn(num_tokens, 2 * size, device=device)).to(dtype)
    assert relative_error(silu_mul(gate_up), reference.silu_mul(gate_up.double())) <= BOUNDS[dtype]
