"""Products of pairs with their experts' matrices against one product a pair."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, relative_error

from baton.kernels.moe.products import expert_products


class Case(NamedTuple):
    num_tokens: int
    top_k: int
    num_experts: int
    k: int
    rows: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.top_k}of{self.num_experts}-{self.k}x{self.rows}-{NAMES[self.dtype]}"


SMALL = [Case(5, 2, 6, 48, 40, torch.float32), Case(30, 3, 4, 40, 24, torch.float32)]
GRID = [Case(64, 8, 128, 2048, 1536, torch.bfloat16), Case(700, 4, 32, 2880, 2880, torch.bfloat16)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_each_pair_is_multiplied_by_its_experts_matrix(case: Case, device: str, biased: bool) -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(case.dtype)

    ids = torch.stack([torch.randperm(case.num_experts)[: case.top_k] for _ in range(case.num_tokens)]).to(device)
    rows, weight = random(ids.numel(), case.k), random(case.num_experts, case.rows, case.k)
    bias = random(case.num_experts, case.rows) if biased else None
    found = expert_products(rows, ids, weight, bias)
    expected = torch.stack([weight[e].double() @ x.double() for e, x in zip(ids.flatten().tolist(), rows, strict=True)])
    if bias is not None:
        expected += bias[ids.flatten()].double()
    assert relative_error(found, expected) < BOUNDS[case.dtype]
