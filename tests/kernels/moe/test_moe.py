"""Experts on the device: pairs in tiles, and the three launches over them, against the reference in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.harness import BOUNDS, NAMES, cases, relative_error
from torch import Tensor

from baton.kernels import reference
from baton.kernels.moe.align import align
from baton.kernels.moe.experts import run_experts
from baton.kernels.moe.few import run_few
from baton.kernels.moe.tiling import choose_tile, choose_tiling
from baton.kernels.routing import Gate


class Pairs(NamedTuple):
    num_tokens: int
    top_k: int
    num_experts: int
    tile: int
    spread: int = 0  # experts that tokens choose among; 0: all

    def ids(self, device: str) -> Tensor:
        among = self.spread or self.num_experts
        scores = torch.rand(self.num_tokens, among, device=device)
        return scores.topk(self.top_k, dim=-1).indices + (self.num_experts - among)


FEW = [
    Pairs(1, 2, 5, 16),
    Pairs(40, 3, 7, 16),
    Pairs(33, 1, 4, 32, 1),
    Pairs(700, 2, 3, 16),
    Pairs(750, 3, 6, 32, 4),
    Pairs(900, 3, 5, 192),
]
MANY = [Pairs(1, 8, 128, 16), Pairs(64, 8, 256, 16), Pairs(4096, 8, 128, 128), Pairs(8192, 4, 32, 128, 5)]


@pytest.mark.parametrize(("case", "device"), cases(FEW, MANY))
def test_each_pair_has_one_place_in_a_tile_of_its_expert(case: Pairs, device: str) -> None:
    ids = case.ids(device)
    aligned = align(ids, case.num_experts, case.tile)
    flat, num_pairs = ids.flatten().cpu(), ids.numel()
    found: list[int] = []
    for expert, places in zip(aligned.experts.tolist(), aligned.pairs.view(-1, case.tile).tolist(), strict=True):
        mine = [pair for pair in places if pair != num_pairs] if expert >= 0 else []
        assert (expert < 0) == (not mine)
        assert all(flat[pair] == expert for pair in mine)
        assert places[: len(mine)] == mine
        found += mine
    assert sorted(found) == list(range(num_pairs))
    assert found == flat.sort(stable=True).indices.tolist()
    assert [int(aligned.pairs[place]) for place in aligned.places] == list(range(num_pairs))
    for expert, (first, count) in enumerate(aligned.spans.tolist()):
        assert aligned.experts[first : first + count].tolist() == [expert] * count
    used = [expert for expert in aligned.experts.tolist() if expert >= 0]
    assert used == aligned.experts.tolist()[: len(used)]


class Experts(NamedTuple):
    pairs: Pairs
    hidden: int
    size: int
    dtype: torch.dtype
    gate: Gate = Gate()
    biased: bool = False

    def __str__(self) -> str:
        pairs = "x".join(map(str, self.pairs))
        return f"{pairs}-{self.hidden}-{self.size}-{NAMES[self.dtype]}{'-biased' * self.biased}"


SMALL = [
    Experts(Pairs(1, 2, 4, 0), 96, 80, torch.float32),
    Experts(Pairs(21, 3, 6, 0), 64, 48, torch.float32),
    Experts(Pairs(50, 2, 3, 0, 2), 80, 64, torch.float16, Gate(0.5, 1.3), True),
]
GRID = [
    Experts(Pairs(1, 8, 128, 0), 2048, 768, torch.bfloat16),
    Experts(Pairs(64, 8, 128, 0), 2048, 768, torch.bfloat16),
    Experts(Pairs(4096, 8, 128, 0), 2048, 768, torch.bfloat16),
    Experts(Pairs(64, 4, 32, 0), 2880, 2880, torch.bfloat16, Gate(7.0), True),
    Experts(Pairs(300, 2, 8, 0), 1024, 512, torch.float32),
    Experts(Pairs(100, 6, 64, 0, 10), 512, 1408, torch.float16),
]


FEW_TOKENS = [
    Experts(Pairs(1, 2, 4, 0), 96, 80, torch.float32),
    Experts(Pairs(3, 3, 6, 0), 80, 48, torch.float16, Gate(0.5, 1.3), True),
]
FEW_GRID = [
    Experts(Pairs(2, 4, 32, 0), 2880, 2880, torch.bfloat16, Gate(7.0), True),
    Experts(Pairs(4, 8, 64, 0), 7168, 2048, torch.bfloat16),
]


class Inputs(NamedTuple):
    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    gate: Gate
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def of(self, tokens: Tensor) -> Inputs:
        """Returns some of the tokens."""
        return self._replace(x=self.x[tokens], weights=self.weights[tokens], ids=self.ids[tokens])


def inputs(case: Experts, device: str) -> Inputs:
    num_tokens, top_k, num_experts = case.pairs[:3]
    gate_up = torch.randn(num_experts, 2 * case.size, case.hidden, device=device) / case.hidden**0.5
    down = torch.randn(num_experts, case.hidden, case.size, device=device) / case.size**0.5
    biases = [torch.randn(num_experts, rows, device=device) for rows in (2 * case.size, case.hidden)]
    return Inputs(
        torch.randn(num_tokens, case.hidden, device=device).to(case.dtype),
        torch.rand(num_tokens, top_k, device=device),
        case.pairs.ids(device),
        gate_up.to(case.dtype),
        down.to(case.dtype),
        case.gate,
        *(bias.to(case.dtype) if case.biased else None for bias in biases),
    )


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_experts_equal_their_reference(case: Experts, device: str) -> None:
    given = inputs(case, device)
    wide = [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in given]
    assert relative_error(run_experts(*given), reference.run_experts(*wide)) <= BOUNDS[case.dtype]


@pytest.mark.parametrize(("case", "device"), cases(FEW_TOKENS, [*FEW_TOKENS, GRID[0], *FEW_GRID]))
def test_experts_of_few_tokens_equal_their_reference(case: Experts, device: str) -> None:
    given = inputs(case, device)
    wide = [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in given]
    expected = reference.run_experts(*wide)
    assert relative_error(run_few(*given), expected) <= BOUNDS[case.dtype]
    residual = torch.randn_like(given.x)
    expected += residual.double()
    assert run_few(*given, residual=residual) is residual
    assert relative_error(residual, expected) <= BOUNDS[case.dtype]
    norm, x = torch.rand(case.hidden, device=device).to(case.dtype), given.x
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-3) * norm.double()
    expected = x.double() + reference.run_experts(normed, *wide[1:])
    run_few(*given, norm=norm, eps=1e-3, residual=x)
    assert relative_error(x, expected) <= BOUNDS[case.dtype]


@pytest.mark.parametrize(("case", "device"), cases(SMALL[1:2], GRID[2:4]))
def test_a_token_is_bit_identical_in_any_company(case: Experts, device: str) -> None:
    given = inputs(case, device)
    whole, num_tokens = run_experts(*given), case.pairs.num_tokens
    order = torch.randperm(num_tokens, device=device)
    assert torch.equal(run_experts(*given.of(order)), whole[order])
    for count in (1, num_tokens // 3):
        assert torch.equal(run_experts(*given.of(order[:count])), whole[order[:count]])


HOPPER = [
    Experts(Pairs(4096, 8, 128, 0), 2048, 768, torch.bfloat16),
    Experts(Pairs(1000, 4, 32, 0), 2880, 2880, torch.bfloat16, Gate(7.0), True),
    Experts(Pairs(300, 2, 8, 0, 3), 520, 200, torch.float16),
    Experts(Pairs(1, 2, 8, 0), 64, 64, torch.float16),
    Experts(Pairs(700, 6, 64, 0, 10), 512, 1408, torch.float16, Gate(0.5, 1.3), True),
]


@pytest.mark.parametrize(("case", "device"), cases([], HOPPER))
def test_hoppers_experts_equal_their_reference(case: Experts, device: str) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from baton.kernels.moe.experts_hopper import run_experts_hopper

    given = inputs(case, device)
    wide = [value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in given]
    assert relative_error(run_experts_hopper(*given), reference.run_experts(*wide)) <= BOUNDS[case.dtype]


@pytest.mark.parametrize("tile", [16, 128])
def test_tilings_sum_in_steps_that_divide_and_do_not_depend_on_the_tile(tile: int) -> None:
    for k, itemsize in ((768, 2), (2880, 2), (80, 2), (48, 4)):
        tiling = choose_tiling(k, itemsize, tile)
        assert k % tiling.block_k == 0
        assert tiling.block_k == choose_tiling(k, itemsize, 32).block_k


def test_stages_fit_the_shared_memory() -> None:
    for tile, matrices, itemsize in ((128, 2, 2), (16, 2, 2), (64, 2, 4), (128, 1, 2)):
        for shared_bytes in (99 * 1024, 163 * 1024, 227 * 1024):
            tiling = choose_tiling(2048, itemsize, tile, matrices, shared_bytes)
            rows = matrices * tiling.block_n + tile
            assert tiling.num_stages >= 2
            assert tiling.num_stages * rows * tiling.block_k * itemsize <= shared_bytes


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "tile"), [(8, 128, 16), (256, 8, 64), (512, 8, 128), (65536, 128, 128)]
)
def test_tiles_hold_what_an_expert_has(num_pairs: int, num_experts: int, tile: int) -> None:
    assert choose_tile(num_pairs, num_experts) == tile
