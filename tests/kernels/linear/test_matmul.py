"""The batch-invariant linear: right, and the same bits whatever other rows there are."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, poisoned, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.matmul import matmul
from baton.kernels.linear.small_linear import small_linear

COUNTS = (1, 2, 17, 64, 65, 129, 300)


class Case(NamedTuple):
    n: int
    k: int
    dtype: torch.dtype
    gated: bool
    added: bool

    def __str__(self) -> str:
        return f"{self.n}x{self.k}-{NAMES[self.dtype]}-{'g' * self.gated}{'r' * self.added}"


SMALL = [Case(96, 128, torch.float32, False, False), Case(70, 96, torch.float32, True, True)]
GRID = [
    Case(4096, 4096, torch.bfloat16, False, True),
    Case(1000, 4096, torch.bfloat16, True, False),
    Case(1000, 96, torch.float16, True, True),
    Case(200, 576, torch.float32, False, True),
]


def arguments(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(max(COUNTS), case.k, device=device).to(case.dtype)
    rows = case.n * (2 if case.gated else 1)
    weight = (torch.randn(rows, case.k, device=device) / case.k**0.5).to(case.dtype)
    residual = torch.randn(max(COUNTS), case.n, device=device).to(case.dtype) if case.added else None
    return x, weight, residual


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_rows_are_right_and_bit_identical_for_any_number_of_rows(case: Case, device: str) -> None:
    x, weight, residual = arguments(case, device)
    expected = x.double() @ weight.double().T
    if case.gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = functional.silu(gate) * up
    if residual is not None:
        expected = expected + residual.double()
    results = []
    for count in COUNTS:
        out = poisoned(count, case.n, dtype=case.dtype, device=device)
        part = None if residual is None else residual[:count]
        matmul(x[:count], weight, gated=case.gated, residual=part, out=out)
        assert relative_error(out, expected[:count]) <= BOUNDS[case.dtype]
        results.append(out)
    for out in results:
        assert torch.equal(out, results[-1][: len(out)])


@pytest.mark.parametrize(("case", "device"), cases(SMALL[:1], GRID[:1]))
def test_a_row_does_not_depend_on_its_place(case: Case, device: str) -> None:
    x, weight, _ = arguments(case, device)
    order = torch.randperm(max(COUNTS), device=device)
    for count in COUNTS:
        shuffled = matmul(x[order[:count]], weight)
        assert torch.equal(shuffled, matmul(x, weight)[order[:count]])


@pytest.mark.parametrize(("case", "device"), cases(SMALL[:1], []))
def test_a_norm_is_refused(case: Case, device: str) -> None:
    x, weight, _ = arguments(case, device)
    with pytest.raises(ValueError, match="apply rms_norm"):
        small_linear(x[:3], weight, None, norm=x[0], batch_invariant=True)
