"""RMSNorm with its result rounded in the same launch is the two launches, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import cases

from baton.kernels.norm.rms_norm import rms_norm
from baton.kernels.norm.rounded_rms_norm import rounded_rms_norm
from baton.kernels.packed.rounding import rounded

SMALL = [(3, 96, 0, torch.float16), (5, 384, 128, torch.float16), (2, 64, 128, torch.bfloat16)]
GRID = [
    (num_tokens, size, group, torch.bfloat16)
    for num_tokens, size in ((64, 2048), (300, 4096), (17, 2880))
    for group in (0, 128)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("added", [False, True])
def test_a_norm_and_its_rounding_equal_those_of_two_launches(
    case: tuple[int, int, int, torch.dtype], device: str, added: bool
) -> None:
    num_tokens, size, group, dtype = case
    x = torch.randn(num_tokens, size, device=device) * torch.logspace(-3, 2, num_tokens, device=device)[:, None]
    x, residual = x.to(dtype), torch.randn(num_tokens, size, device=device).to(dtype)
    weight = torch.rand(size, device=device).to(dtype)
    before = residual.clone()
    found = rounded_rms_norm(x, weight, 1e-6, group, residual=residual if added else None, row_unit=16)
    values, scale = rounded(rms_norm(x, weight, 1e-6, residual=before if added else None), group)
    assert found.values.shape == (-(-num_tokens // 16) * 16, size)
    assert torch.equal(found.values[:num_tokens].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.scale[:, :num_tokens], scale)
    assert torch.equal(residual, before)
