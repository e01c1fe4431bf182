"""The kernels of LoRA updates against the reference: mixed ranks in one launch, parts, rows without an adapter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, relative_error
from torch import Tensor

from baton.kernels.activation.silu_mul import silu_mul
from baton.kernels.adapters.add import add_adapters, gate_adapters
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
    Case(100, 32, (2000,), (33, 7, 0, 16, 25), 40, torch.float32),  # programs of several blocks of columns
]
GRID = [
    Case(64, 4096, (4096, 5120, 6144), (8, 16, 64, 0, 16), 64, torch.bfloat16),
    Case(1000, 4096, (14336, 28672), (16, 16, 8, 64, 128), 128, torch.bfloat16),
    Case(3, 14336, (4096,), (512, 1, 16, 0, 64), 512, torch.float16),
]
GATED_SMALL = [
    Case(23, 96, (72, 144), (1, 7, 0, 16, 3), 16, torch.float32),
    Case(9, 130, (128, 256), (70, 5, 16, 1, 0), 72, torch.float32),
    Case(150, 32, (1200, 2400), (33, 7, 0, 16, 25), 40, torch.float32),
]
GATED_GRID = [
    Case(64, 4096, (14336, 28672), (8, 16, 64, 0, 16), 64, torch.bfloat16),
    Case(700, 512, (1440, 2880), (8, 16, 64, 0, 130), 130, torch.float16),
]


class Arguments(NamedTuple):
    """Adapters, and where their matrices are."""

    slots: Tensor
    offsets: Tensor
    ranks: Tensor
    scales: Tensor
    max_rank: int

    def exact(self) -> Arguments:
        return self._replace(slots=self.slots.double(), scales=self.scales.double())


def slots_of(num_tokens: int) -> Tensor:
    """Returns a slot for each row, -1 for some."""
    return torch.randint(-1, NUM_SLOTS, (num_tokens,), generator=torch.Generator().manual_seed(7))


def rows_of(slots: Tensor, tile_rows: int, device: str) -> tuple[Tensor, Tensor, int]:
    """Returns the order, the tiles with an empty one at the end, and the most rows of a tile."""
    order = torch.argsort(slots, stable=True)
    tiles = []
    for slot in range(-1, NUM_SLOTS):
        mine = (slots[order] == slot).nonzero().flatten().tolist()
        for start in range(0, len(mine), tile_rows):
            tiles.append((slot, mine[start], min(tile_rows, len(mine) - start)))
    table = torch.tensor([*tiles, (-1, 0, 0)], dtype=torch.int32)
    return order.int().to(device), table.to(device), tile_rows


def arguments(case: Case, width: int, device: str) -> Arguments:
    """Returns random adapters, each matrix at a place of its own, with values between them that must not count."""
    parts, slot_size, table = len(case.ends), 0, []
    ranks = torch.tensor(case.ranks, dtype=torch.int32)[:, None].repeat(1, parts)
    if parts > 1:
        ranks[1, 1] = 0  # an adapter of some parts only
        ranks[0, -1] = max(1, case.ranks[0] // 2)
    widths = [end - begin for begin, end in zip((0, *case.ends), case.ends, strict=False)]
    for own in ranks.tolist():
        place = 0
        for rank, columns in zip(own, widths, strict=True):
            for size in (rank * width, rank * columns):
                table.append(place)
                place += -(-size // 64) * 64 + 64
        slot_size = max(slot_size, place)
    slots = torch.randn(NUM_SLOTS, slot_size) / case.k**0.25
    offsets = torch.tensor(table).view(NUM_SLOTS, parts, 2)
    scales = torch.rand(NUM_SLOTS, parts) + 0.5
    # Rows of a wider table, as those of one linear among others.
    ranks, scales, offsets = (torch.cat((one, one), 1).to(device)[:, :parts] for one in (ranks, scales, offsets))
    return Arguments(slots.to(case.dtype).to(device), offsets, ranks, scales, case.max_rank)


@pytest.mark.parametrize("tile_rows", [3, 64])
@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_updates_equal_the_reference(case: Case, device: str, tile_rows: int) -> None:
    x = torch.randn(case.num_tokens, case.k).to(case.dtype).to(device)
    out = torch.randn(case.num_tokens, case.ends[-1]).to(case.dtype).to(device)
    slots = slots_of(case.num_tokens)
    rows = rows_of(slots, tile_rows, device)
    given = arguments(case, case.k, device)
    expected = add_in_torch(x.double(), out.double(), *given.exact(), case.ends, *rows)
    before = out.clone()
    assert add_adapters(x, out, *given, case.ends, *rows) is out
    assert relative_error(out, expected) < BOUNDS[case.dtype]
    assert torch.equal(out[slots < 0], before[slots < 0]), "rows without an adapter keep their bits"
    assert not torch.equal(out, before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tile_rows", [3, 64])
@pytest.mark.parametrize(("case", "device"), cases(GATED_SMALL, GATED_GRID))
def test_gates_equal_the_reference(case: Case, device: str, tile_rows: int, fused: bool) -> None:
    case = case._replace(ends=case.ends[1:]) if fused else case
    x = torch.randn(case.num_tokens, case.k).to(case.dtype).to(device)
    gate_up = torch.randn(case.num_tokens, case.ends[-1]).to(case.dtype).to(device)
    slots = slots_of(case.num_tokens)
    rows = rows_of(slots, tile_rows, device)
    given = arguments(case, case.k, device)
    updated = add_in_torch(x.double(), gate_up.double(), *given.exact(), case.ends, *rows)
    gate, up = updated.chunk(2, -1)
    unchanged = silu_mul(gate_up)
    gated = gate_adapters(x, gate_up, *given, *rows)
    assert relative_error(gated, torch.nn.functional.silu(gate) * up) < BOUNDS[case.dtype]
    assert torch.equal(gated[slots < 0], unchanged[slots < 0]), "rows without an adapter have the bits of silu_mul"


@pytest.mark.parametrize(("case", "device"), cases(SMALL[:1], GRID[:1]))
def test_embeddings_equal_the_reference(case: Case, device: str) -> None:
    vocab = 97
    given = arguments(case._replace(ends=case.ends[:1]), vocab, device)
    ids = torch.randint(0, vocab, (case.num_tokens,)).to(device)
    out = torch.randn(case.num_tokens, case.ends[0]).to(case.dtype).to(device)
    rows = rows_of(slots_of(case.num_tokens), 16, device)
    expected = embed_in_torch(ids, out.double(), *given.exact(), vocab, *rows)
    embed_adapters(ids, out, *given, vocab, *rows)
    assert relative_error(out, expected) < BOUNDS[case.dtype]


@pytest.mark.parametrize(("case", "device"), cases(SMALL[1:2], []))
def test_outputs_may_be_columns_of_a_wider_matrix(case: Case, device: str) -> None:
    x = torch.randn(case.num_tokens, case.k + 8).to(device)[:, : case.k]
    wide = torch.randn(case.num_tokens, case.ends[-1] + 5).to(device)
    rows = rows_of(slots_of(case.num_tokens), 16, device)
    given = arguments(case, case.k, device)
    expected = add_in_torch(x, wide[:, : case.ends[-1]].clone(), *given, case.ends, *rows)
    after = wide[:, case.ends[-1] :].clone()
    add_adapters(x, wide[:, : case.ends[-1]], *given, case.ends, *rows)
    assert relative_error(wide[:, : case.ends[-1]], expected) < BOUNDS[case.dtype]
    assert torch.equal(wide[:, case.ends[-1] :], after)
