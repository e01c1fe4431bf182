"""The kernels of LoRA updates against the reference: mixed ranks in one launch, parts, rows without an adapter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, relative_error
from torch import Tensor

from baton.kernels.adapters.add import add_adapters
from baton.kernels.adapters.embed import embed_adapters
from baton.kernels.reference.adapters.add import add_adapters as add_in_torch
from baton.kernels.reference.adapters.add import embed_adapters as embed_in_torch

NUM_SLOTS = 5


class Case(NamedTuple):
    num_tokens: int
    k: int
    ends: tuple[int, ...]
    ranks: tuple[int, ...]  # of the slots
    max_rank: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.k}-{self.ends}-r{self.ranks}-{NAMES[self.dtype]}"


SMALL = [
    Case(5, 96, (40,), (1, 7, 0, 16, 3), 16, torch.float32),
    Case(37, 160, (64, 96, 128), (4, 8, 33, 0, 16), 40, torch.float32),
    Case(20, 130, (70, 140), (70, 5, 16, 1, 0), 72, torch.float32),
]
GRID = [
    Case(64, 4096, (4096, 5120, 6144), (8, 16, 64, 0, 16), 64, torch.bfloat16),
    Case(1000, 4096, (14336, 28672), (16, 16, 8, 64, 128), 128, torch.bfloat16),
    Case(3, 14336, (4096,), (512, 1, 16, 0, 64), 512, torch.float16),
]


class Arguments(NamedTuple):
    a: Tensor
    b: Tensor
    ranks: Tensor
    scales: Tensor


def slots_of(num_tokens: int) -> Tensor:
    """Returns a slot for each row, -1 for some."""
    return torch.randint(-1, NUM_SLOTS, (num_tokens,), generator=torch.Generator().manual_seed(7))


def rows_of(slots: Tensor, rows_per_tile: int) -> tuple[Tensor, Tensor]:
    """Returns the order and the tiles of rows with adapters, with an empty tile at the end."""
    order = torch.argsort(slots, stable=True)
    order = order[slots[order] >= 0]
    tiles = []
    for slot in range(NUM_SLOTS):
        mine = (slots[order] == slot).nonzero().flatten().tolist()
        for start in range(0, len(mine), rows_per_tile):
            tiles.append((slot, mine[start], min(rows_per_tile, len(mine) - start)))
    return order, torch.tensor([*tiles, (0, 0, 0)], dtype=torch.int32)


def arguments(case: Case, width: int, device: str) -> Arguments:
    """Returns random adapters, with values beyond their ranks that must not count."""
    parts = len(case.ends)
    a = torch.randn(NUM_SLOTS, parts, case.max_rank, width) / case.k**0.5
    b = torch.randn(NUM_SLOTS, case.ends[-1], case.max_rank)
    ranks = torch.tensor(case.ranks, dtype=torch.int32)[:, None].repeat(1, parts)
    if parts > 1:
        ranks[1, 1] = 0  # an adapter of some parts only
        ranks[0, -1] = max(1, case.ranks[0] // 2)
    scales = torch.rand(NUM_SLOTS, parts) + 0.5
    return Arguments(a.to(case.dtype).to(device), b.to(case.dtype).to(device), ranks.to(device), scales.to(device))


@pytest.mark.parametrize("rows_per_tile", [3, 1000])
@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_updates_equal_the_reference(case: Case, device: str, rows_per_tile: int) -> None:
    x = torch.randn(case.num_tokens, case.k).to(case.dtype).to(device)
    out = torch.randn(case.num_tokens, case.ends[-1]).to(case.dtype).to(device)
    slots = slots_of(case.num_tokens)
    order, tiles = (one.to(device) for one in rows_of(slots, rows_per_tile))
    given = arguments(case, case.k, device)
    exact = [one.double() if one.is_floating_point() else one for one in given]
    expected = add_in_torch(x.double(), out.double(), *exact, case.ends, order, tiles)
    before = out.clone()
    assert add_adapters(x, out, *given, case.ends, order, tiles) is out
    assert relative_error(out, expected) < BOUNDS[case.dtype]
    assert torch.equal(out[slots < 0], before[slots < 0]), "rows without an adapter keep their bits"
    assert not torch.equal(out, before)


@pytest.mark.parametrize(("case", "device"), cases(SMALL[:1], GRID[:1]))
def test_embeddings_equal_the_reference(case: Case, device: str) -> None:
    vocab = 97
    given = arguments(case._replace(ends=case.ends[:1]), vocab, device)
    ids = torch.randint(0, vocab, (case.num_tokens,)).to(device)
    out = torch.randn(case.num_tokens, case.ends[0]).to(case.dtype).to(device)
    order, tiles = (one.to(device) for one in rows_of(slots_of(case.num_tokens), 16))
    exact = [one.double() if one.is_floating_point() else one for one in given]
    expected = embed_in_torch(ids, out.double(), *exact, order, tiles)
    embed_adapters(ids, out, *given, order, tiles)
    assert relative_error(out, expected) < BOUNDS[case.dtype]


@pytest.mark.parametrize(("case", "device"), cases(SMALL[1:2], []))
def test_outputs_may_be_columns_of_a_wider_matrix(case: Case, device: str) -> None:
    x = torch.randn(case.num_tokens, case.k + 8).to(device)[:, : case.k]
    wide = torch.randn(case.num_tokens, case.ends[-1] + 5).to(device)
    order, tiles = (one.to(device) for one in rows_of(slots_of(case.num_tokens), 16))
    given = arguments(case, case.k, device)
    expected = add_in_torch(x, wide[:, : case.ends[-1]].clone(), *given, case.ends, order, tiles)
    after = wide[:, case.ends[-1] :].clone()
    add_adapters(x, wide[:, : case.ends[-1]], *given, case.ends, order, tiles)
    assert relative_error(wide[:, : case.ends[-1]], expected) < BOUNDS[case.dtype]
    assert torch.equal(wide[:, case.ends[-1] :], after)
