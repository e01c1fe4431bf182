"""The kernels of poolers against their oracles: vectors of segments and chunks, and what is made of them."""

from __future__ import annotations

import pytest
import torch
from support.kernels.harness import BOUNDS, cases, relative_error

from baton.kernels.pooling.finish import finish_vectors
from baton.kernels.pooling.pick import pick_vectors
from baton.kernels.pooling_spec import ACTIVATIONS, PICKS, Activation, Pick
from baton.kernels.reference.pooling import finish as finish_oracle
from baton.kernels.reference.pooling import pick as pick_oracle

SMALL = [(48, torch.float32), (200, torch.float16)]
GRID = [(size, dtype) for size in (384, 768, 1000, 4096) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
# First token, tokens, row, tokens in earlier steps.
SEGMENTS = [(0, 5, -1, 0), (5, 1, 2, 0), (6, 40, 0, 7), (46, 17, -1, 0), (20, 1, -1, 0), (63, 16, 1, 1)]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("pick", PICKS)
def test_segments_and_chunks_give_the_oracles_vectors(case: tuple[int, torch.dtype], device: str, pick: Pick) -> None:
    size, dtype = case
    hidden = torch.randn(79, size, device=device).to(dtype)
    segments = torch.tensor(SEGMENTS, device=device).t().contiguous()
    kept = torch.randn(3, size, device=device)
    expected_kept = kept.double()
    expected = pick_oracle.pick_vectors(hidden.double(), segments, pick, expected_kept, torch.float64)
    for out_dtype in (dtype, torch.float32):
        ours = kept.clone()
        found = pick_vectors(hidden, segments, pick, ours, out_dtype)
        assert found.dtype == out_dtype
        assert relative_error(found, expected) <= BOUNDS[out_dtype]
        assert relative_error(ours, expected_kept) <= BOUNDS[torch.float32]


@pytest.mark.parametrize(("case", "device"), cases(SMALL[:1], GRID[3:4]))
@pytest.mark.parametrize("pick", PICKS)
def test_chunks_add_up_to_the_whole_text(case: tuple[int, torch.dtype], device: str, pick: Pick) -> None:
    size, dtype = case
    hidden, kept = torch.randn(29, size, device=device).to(dtype), torch.empty(1, size, device=device)
    whole = torch.tensor([(0, 29, -1, 0)], device=device).t().contiguous()
    expected = pick_vectors(hidden, whole, pick, kept, torch.float32)
    for first, count in ((0, 9), (9, 1), (10, 19)):
        chunk = torch.tensor([(0, count, 0, first)], device=device).t().contiguous()
        found = pick_vectors(hidden[first : first + count].contiguous(), chunk, pick, kept, torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "device"), cases([(1, torch.float32), *SMALL], [(1, torch.bfloat16), *GRID]))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_vectors_are_cut_and_activated_where_it_is_asked(
    case: tuple[int, torch.dtype], device: str, activation: Activation
) -> None:
    width, dtype = case
    x = (3 * torch.randn(5, width, device=device)).to(dtype)
    x[4] = 0
    asked = torch.tensor([(width, 1), (width, 0), (max(1, width // 3), 1), (1, 0), (width, 1)], device=device)
    asked = asked.t().contiguous()
    found = finish_vectors(x, asked, activation)
    torch.testing.assert_close(found, finish_oracle.finish_vectors(x, asked, activation), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("case", "device"), cases([(3, torch.float32)], [(3, torch.float32)]))
def test_large_scores_are_probabilities_without_overflow(case: tuple[int, torch.dtype], device: str) -> None:
    x = torch.tensor([[800.0, -800.0, 0.0]], device=device)
    asked = torch.tensor([[3], [1]], device=device)
    assert finish_vectors(x, asked, "sigmoid").tolist() == [[1.0, 0.0, 0.5]]
    assert finish_vectors(x, asked, "softmax").tolist() == [[1.0, 0.0, 0.0]]
