"""Activations against PyTorch's in float64."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels import reference
from baton.kernels.activation.activate import activate

SMALL = [(1, 64, torch.float32), (3, 2056, torch.float16)]
GRID = [
    (num_tokens, size, dtype)
    for num_tokens, size in ((1, 12_288), (1000, 3072), (17, 2047))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
def test_activations_equal_their_formulas(
    case: tuple[int, int, torch.dtype], device: str, activation: str, gated: bool
) -> None:
    num_tokens, size, dtype = case
    x = (4 * torch.randn(num_tokens, 2 * size if gated else size, device=device)).to(dtype)
    expected = reference.activate(x.double(), activation, gated=gated)
    assert relative_error(activate(x, activation, gated=gated), expected) <= BOUNDS[dtype]


@pytest.mark.parametrize(("case", "device"), cases([torch.float16], [torch.float16, torch.bfloat16]))
def test_gelu_of_every_half_is_rounded_once(case: torch.dtype, device: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(case)
    x = every[every.abs() < 100].to(device)[None]
    expected = reference.activate(x.double(), "gelu", gated=False)
    error = (activate(x, "gelu", gated=False).double() - expected).abs()
    assert bool((error <= 5e-7 + 0.51 * torch.finfo(case).eps * expected.abs()).all())
