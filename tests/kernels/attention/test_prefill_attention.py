"""Prefill attention, the generic kernel and Hopper's, against their oracle in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.kernels.harness import (
    BOUNDS,
    FP8,
    GRID,
    SMALL,
    Shape,
    cases,
    paged_kv,
    poisoned,
    ragged_lengths,
    random_kv_scale,
    relative_error,
)
from torch import Tensor

from baton.kernels import reference
from baton.kernels.attention.prefill import MAX_PLACES, make_tiles, prefill_attention

TILE_ROWS = 128
WIDE = [Shape(512, 16, torch.float16, 2, 1), Shape(512, 32, torch.float32, 1, 1)]
# Rows beyond a chunk's end see nothing under a window: 0 / 0, which is not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


def prefill_error(
    shape: Shape,
    chunks: list[int],
    prefixes: list[int],
    device: str,
    kernel: Callable[..., Tensor] = prefill_attention,
    cache_dtype: torch.dtype | None = None,
    cut: bool = False,
    with_sinks: bool = False,
    **options: float,
) -> float:
    """Of the chunks, which follow their cached prefixes. `cut`: the tiles' parts are used, and there must be some."""
    lengths = [chunk + prefix for chunk, prefix in zip(chunks, prefixes, strict=True)]
    paged = paged_kv(lengths, shape, device, cache_dtype)
    kv_scale = random_kv_scale(shape.num_kv_heads, device) if cache_dtype == FP8 else None
    scales = {} if kv_scale is None else {"kv_scale": kv_scale}
    num_q_heads = shape.group * shape.num_kv_heads
    wide = torch.randn(sum(chunks), num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device)
    query = wide.to(shape.dtype)[:, :num_q_heads]
    starts = torch.tensor([0, *chunks], device=device).cumsum(0).int()
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    scale = 1 / math.sqrt(shape.head_dim)
    tile_rows, num_cut = int(options.get("tile_rows", TILE_ROWS)), num_q_heads if cut else 0
    tiles = make_tiles(chunks, prefixes, tile_rows, torch.device(device), num_cut)
    assert (tiles.parts is not None) == cut
    sinks = torch.randn(num_q_heads, device=device).to(shape.dtype) if with_sinks else None
    more = {**scales, **({"sinks": sinks} if with_sinks else {})}
    kernel(query, *paged, starts, tiles, scale, out=out, **more, **options)
    expected = reference.prefill_attention(
        query.double(),
        paged.cache.double() if kv_scale is None else paged.cache,
        paged.own_table,
        paged.seq_lens,
        starts,
        scale,
        kv_scale=kv_scale,
        window=int(options.get("window", 0)),
        soft_cap=options.get("soft_cap", 0.0),
        sinks=sinks,
    )
    return relative_error(out, expected)


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_chunks_of_any_length_behind_any_prefix(shape: Shape, device: str) -> None:
    if device == "cpu":
        error = prefill_error(shape, [1, shape.block_size, 33], [0, shape.block_size + 1, 0], device, tile_rows=32)
    else:
        edges = [1, shape.block_size - 1, shape.block_size, shape.block_size + 1, 127, 128, 129, 300, 1, 5]
        error = prefill_error(shape, edges, [0, 0, 1, 64, 63, 128, 0, 1000, 4096, 127], device)
    assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[11]]))
def test_one_sequence_of_one_token(shape: Shape, device: str) -> None:
    assert prefill_error(shape, [1], [0], device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[0], GRID[3]]))
def test_a_thousand_sequences(shape: Shape, device: str) -> None:
    prefixes = [prefix - 1 for prefix in ragged_lengths(1000, 200)]
    assert prefill_error(shape, ragged_lengths(1000, 20), prefixes, device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[0], GRID[11]]))
def test_the_end_of_131072_tokens_beside_a_fresh_prompt(shape: Shape, device: str) -> None:
    assert prefill_error(shape, [700, 2048], [131_072 - 700, 0], device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0]]))
@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_hides_all_but_the_last_keys(shape: Shape, device: str, window: int) -> None:
    options = {"window": window, **({"tile_rows": 32} if device == "cpu" else {})}
    assert prefill_error(shape, [1, 40, 70], [30, 0, 60], device, **options) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[10], GRID[12]]))
@pytest.mark.parametrize("window", [0, 20])
def test_a_soft_cap_bounds_scores(shape: Shape, device: str, window: int) -> None:
    options = {"window": window, "soft_cap": 0.7, **({"tile_rows": 32} if device == "cpu" else {})}
    error = prefill_error(shape, [1, 40, 70], [30, 0, 60], device, **options)
    assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[1], GRID[3], GRID[12]]))
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_join_each_softmax(shape: Shape, device: str, window: int) -> None:
    options = {"window": window, **({"tile_rows": 32} if device == "cpu" else {})}
    error = prefill_error(shape, [1, 40, 70], [30, 0, 60], device, with_sinks=True, **options)
    assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(WIDE, [*WIDE, Shape(512, 64, torch.bfloat16, 8)]))
@pytest.mark.parametrize(("window", "soft_cap", "with_sinks"), [(0, 0.0, False), (20, 0.7, True)])
def test_heads_of_512(shape: Shape, device: str, window: int, soft_cap: float, with_sinks: bool) -> None:
    options = {"window": window, "soft_cap": soft_cap, **({"tile_rows": 32} if device == "cpu" else {})}
    error = prefill_error(shape, [1, 40], [30, 0], device, with_sinks=with_sinks, **options)
    assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[5], GRID[6], GRID[10]]))
def test_keys_and_values_in_8_bits_count_with_their_heads_scale(shape: Shape, device: str) -> None:
    options = {"tile_rows": 32} if device == "cpu" else {}
    error = prefill_error(shape, [1, 40, 129], [0, 17, 63], device, cache_dtype=FP8, **options)
    assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[11]]))
def test_a_row_is_bit_identical_however_its_prompt_is_cut(shape: Shape, device: str) -> None:
    length, tile_rows = (90, 32) if device == "cpu" else (1500, TILE_ROWS)
    paged = paged_kv([length], shape, device)
    query = torch.randn(length, shape.group * shape.num_kv_heads, shape.head_dim, device=device).to(shape.dtype)

    def attend(first: int, last: int) -> Tensor:
        chunk, where = last - first, torch.device(device)
        seq_lens, starts = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([last], [0, chunk]))
        tiles = make_tiles([chunk], [first], tile_rows, where)
        arguments = (query[first:last], paged.cache, paged.block_table, paged.rows, seq_lens, starts, tiles, 0.1)
        return prefill_attention(*arguments, tile_rows=tile_rows)

    whole = attend(0, length)
    cuts = [0, 1, length // 3, length // 2 + 5, length]
    assert torch.equal(torch.cat([attend(*pair) for pair in pairwise(cuts)]), whole)


HOPPER = [
    Shape(128, 16, torch.bfloat16, 4),
    Shape(64, 16, torch.float16, 1),
    Shape(64, 64, torch.bfloat16, 8),
    Shape(128, 32, torch.float16, 16),
    Shape(128, 64, torch.bfloat16, 2),
    Shape(128, 128, torch.bfloat16, 7),
]


@pytest.fixture
def hopper() -> Callable[..., Tensor]:
    """The kernel; on other cards, the generic one stands for it."""
    if torch.cuda.get_device_capability()[0] != 9:
        return prefill_attention
    from baton.kernels.attention.prefill_hopper import prefill_attention_hopper

    return prefill_attention_hopper


@pytest.mark.parametrize(("shape", "device"), cases([], HOPPER))
def test_hoppers_kernel_equals_the_oracle(shape: Shape, device: str, hopper: Callable[..., Tensor]) -> None:
    edges = [1, shape.block_size - 1, shape.block_size, shape.block_size + 1, 127, 128, 129, 300, 1, 5]
    prefixes = [0, 0, 1, 64, 63, 128, 0, 1000, 4096, 127]
    assert prefill_error(shape, edges, prefixes, device, hopper) <= BOUNDS[shape.dtype]
    assert prefill_error(shape, [1], [0], device, hopper) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], HOPPER))
@pytest.mark.parametrize(
    ("chunks", "prefixes"),
    [([16], [4080]), ([1], [131_071]), ([5, 1], [700, 3000]), ([129], [5000]), ([300, 1, 1], [4096, 0, 200])],
)
def test_hoppers_kernel_merges_the_parts_of_few_tiles(
    shape: Shape, device: str, hopper: Callable[..., Tensor], chunks: list[int], prefixes: list[int]
) -> None:
    if hopper is prefill_attention:
        pytest.skip("only Hopper's kernel cuts tiles")
    from baton.kernels.attention.prefill_hopper import PrefillWorkspace

    num_q_heads = shape.group * shape.num_kv_heads
    if make_tiles(chunks, prefixes, TILE_ROWS, torch.device(device), num_q_heads).parts is None:
        chunks, prefixes = chunks[-1:], prefixes[:1]  # with so many heads all of them fill the device
    workspace = PrefillWorkspace(num_q_heads, shape.head_dim, torch.device(device))

    def attend(*arguments: object, **options: object) -> Tensor:
        found = hopper(*arguments, workspace=workspace, **options)
        assert torch.equal(found, hopper(*arguments, workspace=workspace, **{**options, "out": None}))
        return found

    assert prefill_error(shape, chunks, prefixes, device, attend, cut=True) <= BOUNDS[shape.dtype]
    assert not workspace.arrived.any()


@pytest.mark.parametrize("num_q_heads", [1, 8, 14, 32, 64])
def test_tiles_are_cut_into_parts_that_fill_one_wave(num_q_heads: int) -> None:
    random = np.random.default_rng(num_q_heads)
    num_cut = 0
    for _ in range(200):
        num_seqs = int(random.integers(1, 6))
        chunks, prefixes = random.integers(1, 400, num_seqs).tolist(), random.integers(0, 40_000, num_seqs).tolist()
        tiles = make_tiles(chunks, prefixes, TILE_ROWS, torch.device("cpu"), num_q_heads)
        if tiles.parts is None:
            continue
        num_cut += 1
        parts = iter(tiles.parts.tolist())
        place = 0
        for seq, start in zip(tiles.seq.tolist(), tiles.start.tolist(), strict=True):
            found = [next(parts)]
            count = found[0][2] >> 16
            found += [next(parts) for _ in range(count - 1)]
            assert found == [[seq, start, number | count << 16, place] for number in range(count)]
            assert count == 1 or prefixes[seq] + min(chunks[seq], start + TILE_ROWS) >= count * TILE_ROWS
            place += count if count > 1 else 0
        assert next(parts, None) is None
        assert place <= MAX_PLACES // num_q_heads
    assert num_cut


@pytest.mark.parametrize(("chunks", "prefixes"), [([8192], [0]), ([2048], [0]), ([128] * 4, [0] * 4), ([1], [100])])
def test_tiles_that_fill_the_device_or_have_few_keys_stay_whole(chunks: list[int], prefixes: list[int]) -> None:
    assert make_tiles(chunks, prefixes, TILE_ROWS, torch.device("cpu"), 32).parts is None


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[0]]))
def test_hoppers_kernel_leaves_windows_and_8_bits_to_the_generic_one(
    shape: Shape, device: str, hopper: Callable[..., Tensor]
) -> None:
    assert prefill_error(shape, [1, 40, 129], [0, 17, 63], device, hopper, FP8) <= BOUNDS[shape.dtype]
    assert prefill_error(shape, [1, 40, 129], [0, 17, 63], device, hopper, window=20) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], HOPPER[:1]))
def test_hoppers_kernel_on_many_and_on_long_sequences(shape: Shape, device: str, hopper: Callable[..., Tensor]) -> None:
    prefixes = [prefix - 1 for prefix in ragged_lengths(1000, 200)]
    assert prefill_error(shape, ragged_lengths(1000, 20), prefixes, device, hopper) <= BOUNDS[shape.dtype]
    assert prefill_error(shape, [700, 2048], [131_072 - 700, 0], device, hopper) <= BOUNDS[shape.dtype]
