"""A gate with its result rounded in the same launch is the two launches, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import cases

from baton.kernels.activation.rounded_silu_mul import rounded_silu_mul
from baton.kernels.activation.silu_mul import silu_mul
from baton.kernels.packed.rounding import rounded

SMALL = [(3, 96, 0, torch.float16), (5, 2432, 128, torch.float16), (2, 64, 128, torch.bfloat16)]
GRID = [
    (num_tokens, size, group, torch.bfloat16)
    for num_tokens, size in ((64, 768), (300, 14_336), (17, 2880))
    for group in (0, 128)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_a_gate_and_its_rounding_equal_those_of_two_launches(
    case: tuple[int, int, int, torch.dtype], device: str
) -> None:
    num_tokens, size, group, dtype = case
    x = torch.randn(num_tokens, 2 * size, device=device) * torch.logspace(-3, 1, num_tokens, device=device)[:, None]
    x = x.to(dtype)
    found = rounded_silu_mul(x, group, row_unit=16)
    values, scale = rounded(silu_mul(x), group)
    assert found.values.shape == (-(-num_tokens // 16) * 16, size)
    assert torch.equal(found.values[:num_tokens].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.scale[:, :num_tokens], scale)
