"""The linear of few tokens, with all that is fused into it, against float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, poisoned, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.small_linear import MAX_TOKENS, Tiling, Workspace, small_linear


class Case(NamedTuple):
    m: int
    n: int
    k: int
    dtype: torch.dtype
    normed: bool
    gated: bool
    added: bool
    tiling: Tiling | None = None
    biased: bool = False

    def __str__(self) -> str:
        fused = (self.normed, self.gated, self.added, self.biased)
        marks = "".join(mark for mark, on in zip("ngrb", fused, strict=True) if on)
        return f"{self.m}x{self.n}x{self.k}-{NAMES[self.dtype]}-{marks}-{self.tiling.splits if self.tiling else ''}"


CUT = Tiling(32, 32, 2, 4, 2)
WHOLE = Tiling(32, 32, 1, 4, 2)
SMALL = [
    Case(m, 96, 128, torch.float32, normed, gated, added, tiling, biased)
    for m, normed, gated, added in ((1, True, True, False), (3, True, True, True), (16, False, False, True))
    for tiling in (CUT, WHOLE)
    for biased in (False, True)
] + [Case(17, 70, 128, torch.float16, True, False, False), Case(1, 70, 128, torch.float16, False, False, True)]
# The linears of an 8B decoder, and odd ones.
SHAPES = [
    (6144, 4096, True, False, False),
    (4096, 4096, False, False, True),
    (12_288, 4096, True, True, False),
    (4096, 12_288, False, False, True),
    (1000, 96, True, True, True),
]
GRID = [
    *(Case(m, shape[0], shape[1], torch.bfloat16, *shape[2:]) for m in (1, 2, 16) for shape in SHAPES),
    *(Case(m, shape[0], shape[1], torch.bfloat16, *shape[2:]) for m in (17, 64) for shape in SHAPES[1::3]),
    *(Case(m, 2560, 2048, torch.float16, True, False, False) for m in (1, 64)),
    *(Case(m, 600, 576, torch.float32, True, False, False) for m in (1, 16, 64)),
    *(Case(m, 5120, 2880, torch.bfloat16, True, False, False, biased=True) for m in (1, 2, 16)),
    *(Case(m, 2880, 4096, torch.bfloat16, False, False, True, biased=True) for m in (1, 16, 64)),
    Case(3, 1000, 96, torch.bfloat16, True, True, True, biased=True),
]


def linear_oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, gated: bool, residual: Tensor | None
) -> Tensor:
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    out = wide @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_small_linear_equals_its_oracle(case: Case, device: str) -> None:
    x = torch.randn(case.m, case.k, device=device).to(case.dtype)
    rows = case.n * (2 if case.gated else 1)
    weight = (torch.randn(rows, case.k, device=device) / case.k**0.5).to(case.dtype)
    norm = (torch.rand(case.k, device=device) + 0.5).to(case.dtype) if case.normed else None
    residual = torch.randn(case.m, case.n, device=device).to(case.dtype) if case.added else None
    bias = torch.randn(rows, device=device).to(case.dtype) if case.biased else None
    workspace = Workspace(torch.device(device))
    workspace.partial.fill_(float("nan"))
    workspace.squares.fill_(float("nan"))
    expected = linear_oracle(x, weight, bias, norm, case.gated, residual)
    for _ in range(2):  # the second time shows that the counters went back to 0
        out = poisoned(case.m, case.n, dtype=case.dtype, device=device)
        fused = {"bias": bias, "norm": norm, "gated": case.gated, "residual": residual}
        small_linear(x, weight, workspace, **fused, out=out, tiling=case.tiling)
        assert relative_error(out, expected) <= BOUNDS[case.dtype]
    assert not workspace.arrived.any()


@pytest.mark.parametrize(("m", "device"), cases([3], [3]))
def test_the_residual_may_be_the_output(m: int, device: str) -> None:
    x, weight, residual = (torch.randn(shape, device=device) for shape in ((m, 64), (32, 64), (m, 32)))
    expected = linear_oracle(x, weight, None, None, False, residual)
    small_linear(x, weight, Workspace(torch.device(device)), residual=residual, out=residual)
    assert relative_error(residual, expected) <= BOUNDS[torch.float32]


@pytest.mark.parametrize(("m", "device"), cases([MAX_TOKENS + 1], []))
def test_too_many_tokens_are_refused(m: int, device: str) -> None:
    with pytest.raises(ValueError, match="65 tokens"):
        small_linear(torch.randn(m, 64), torch.randn(32, 64), Workspace(torch.device(device)))


@pytest.mark.parametrize(("m", "device"), cases([16], []))
def test_a_workspace_that_is_too_small_is_refused(m: int, device: str) -> None:
    workspace = Workspace(torch.device(device), num_floats=64)
    with pytest.raises(ValueError, match="1024 floats"):
        small_linear(torch.randn(m, 64), torch.randn(32, 64), workspace, tiling=CUT)
