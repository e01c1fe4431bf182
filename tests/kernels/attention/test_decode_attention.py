"""Decode attention against its oracle in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.harness import (
    BOUNDS,
    FP8,
    GRID,
    SMALL,
    Paged,
    Shape,
    cases,
    edge_lengths,
    paged_kv,
    poisoned,
    ragged_lengths,
    random_kv_scale,
    relative_error,
)
from torch import Tensor

from baton.kernels import reference
from baton.kernels.attention.decode import DecodeWorkspace, cut_for_decode, decode_attention
from baton.kernels.attention.decode_cuts import INVARIANT_PIECES, DecodeCuts, cut_sequences, max_pieces

LONG = [1, 131_072, 131_071, 70_000]
PROGRAMS = (1, 64)
WIDE = [Shape(512, 16, torch.float16, 2, 1), Shape(512, 32, torch.float32, 1, 1)]
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def make_workspace(shape: Shape, num_seqs: int, device: str, *, batch_invariant: bool = False) -> DecodeWorkspace:
    num_q_heads, num_kv_heads = shape.group * shape.num_kv_heads, shape.num_kv_heads
    where = torch.device(device)
    workspace = DecodeWorkspace(
        num_seqs, num_q_heads, num_kv_heads, shape.head_dim, where, batch_invariant=batch_invariant
    )
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    return workspace


def attend(query: Tensor, paged: Paged, cuts: DecodeCuts, scale: float, workspace: DecodeWorkspace, **more) -> Tensor:
    """Attends twice, because the state after a launch must not affect the next."""
    decode_attention(query, paged.cache, paged.block_table, paged.rows, cuts, scale, workspace, **more)
    out = decode_attention(query, paged.cache, paged.block_table, paged.rows, cuts, scale, workspace, **more)
    assert not workspace.arrived.any()
    return out


def make_query(shape: Shape, num_seqs: int, device: str) -> Tensor:
    """A part of wider rows, as the query of a qkv product is."""
    num_q_heads = shape.group * shape.num_kv_heads
    wide = torch.randn(num_seqs, num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, device=device)
    return wide.to(shape.dtype)[:, :num_q_heads]


def decode_error(
    shape: Shape,
    seq_lens: list[int],
    device: str,
    programs: int | None = None,
    window: int = 0,
    cache_dtype: torch.dtype | None = None,
    soft_cap: float = 0.0,
    with_sinks: bool = False,
) -> float:
    paged = paged_kv(seq_lens, shape, device, cache_dtype)
    query = make_query(shape, len(seq_lens), device)
    kv_scale = random_kv_scale(shape.num_kv_heads, device) if cache_dtype == FP8 else None
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    scale = 1 / math.sqrt(shape.head_dim)
    quantized = cache_dtype == FP8
    sinks = torch.randn(query.shape[1], device=device).to(shape.dtype) if with_sinks else None
    options = {"window": window, "soft_cap": soft_cap, "sinks": with_sinks}
    cuts = cut_for_decode(paged.seq_lens, paged.cache, query.dtype, quantized=quantized, **options)
    if programs is not None:
        cuts = cut_sequences(paged.seq_lens, shape.num_kv_heads, programs, window=window)
    workspace = make_workspace(shape, len(cuts.pieces), device)
    attend(query, paged, cuts, scale, workspace, out=out, kv_scale=kv_scale, soft_cap=soft_cap, sinks=sinks)
    return relative_error(out, oracle(query, paged, scale, window, kv_scale, soft_cap, sinks))


def oracle(
    query: Tensor,
    paged: Paged,
    scale: float,
    window: int = 0,
    kv_scale: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    wide = paged.cache.double() if kv_scale is None else paged.cache
    options = {"kv_scale": kv_scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    return reference.decode_attention(query.double(), wide, paged.own_table, paged.seq_lens, scale, **options)


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_few_sequences_of_any_length(shape: Shape, device: str) -> None:
    block_size = shape.block_size
    batches = [[1], [block_size], [block_size + 1], [200]]
    if device == "cuda":
        batches += [[4097], [1, 130, 1000], [1, 2, block_size - 1, block_size, 255, 256, 257, 3000]]
    for lengths in batches:
        # One piece holds so few tokens: more programs would only find that they have none.
        programs = 16 if device == "cpu" and lengths[0] < 200 else None
        assert decode_error(shape, lengths, device, programs) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_lengths_at_every_edge_share_a_batch(shape: Shape, device: str) -> None:
    lengths = [1, shape.block_size, shape.block_size + 1, 130] if device == "cpu" else edge_lengths(shape.block_size)
    for programs in PROGRAMS:
        assert decode_error(shape, lengths, device, programs) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], GRID))
def test_a_thousand_sequences(shape: Shape, device: str) -> None:
    assert decode_error(shape, ragged_lengths(1000, 300), device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([], [GRID[0], GRID[3], GRID[11]]))
def test_sequences_of_131072_tokens(shape: Shape, device: str) -> None:
    assert decode_error(shape, LONG, device) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[12]]))
@pytest.mark.parametrize("window", [1, 20, 128])
def test_a_window_hides_all_but_the_last_keys(shape: Shape, device: str, window: int) -> None:
    for programs in PROGRAMS:
        assert decode_error(shape, [1, 17, 700], device, programs, window) <= BOUNDS[shape.dtype]


# In this test and the next, columns beyond the last head are 0 / 0 where pieces merge, and are not stored.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[10], GRID[12]]))
@pytest.mark.parametrize("window", [0, 20])
def test_a_soft_cap_bounds_scores(shape: Shape, device: str, window: int) -> None:
    for programs in (None, *PROGRAMS):
        error = decode_error(shape, [1, 17, 300], device, programs, window, soft_cap=0.7)
        assert error <= BOUNDS[shape.dtype]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[1], GRID[3], GRID[12]]))
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_join_each_softmax(shape: Shape, device: str, window: int) -> None:
    for programs in (None, *PROGRAMS):
        error = decode_error(shape, [1, 17, 300], device, programs, window, with_sinks=True)
        assert error <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(WIDE, [*WIDE, Shape(512, 64, torch.bfloat16, 8)]))
@pytest.mark.parametrize(("window", "soft_cap", "with_sinks"), [(0, 0.0, False), (20, 0.7, True)])
def test_heads_of_512(shape: Shape, device: str, window: int, soft_cap: float, with_sinks: bool) -> None:
    error = decode_error(shape, [1, 17, 70], device, 4, window, None, soft_cap, with_sinks)
    assert error <= BOUNDS[shape.dtype]


HOPPERS = [
    Shape(64, 16, torch.bfloat16, 8),
    Shape(64, 64, torch.float16, 4),
    Shape(128, 16, torch.bfloat16, 4),
    Shape(128, 32, torch.bfloat16, 16),
]


@pytest.mark.parametrize(("shape", "device"), cases([], HOPPERS))
@pytest.mark.parametrize("window", [0, 1, 20, 128, 1000])
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(0.0, False), (0.0, True), (0.7, False), (0.7, True)])
def test_hoppers_kernel_has_windows_soft_caps_and_sinks(
    shape: Shape, device: str, window: int, soft_cap: float, with_sinks: bool
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from baton.kernels.attention.decode_hopper import split_decode

    seq_lens = [1, 15, 64, 129, 1000, 20_000]
    paged, query = paged_kv(seq_lens, shape, device), make_query(shape, len(seq_lens), device)
    sinks = torch.randn(query.shape[1], device=device).to(shape.dtype) if with_sinks else None
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    scale, log2e = 1 / math.sqrt(shape.head_dim), math.log2(math.e)
    for programs in PROGRAMS:
        cuts = cut_sequences(paged.seq_lens, shape.num_kv_heads, programs, window=window)
        workspace = make_workspace(shape, len(cuts.pieces), device)
        pool = (paged.cache, paged.block_table, paged.rows, cuts.pieces)
        scratch = (workspace.partial, workspace.lse, workspace.arrived)
        split_decode(out, query, *pool, *scratch, scale * log2e, soft_cap_log2=soft_cap * log2e, sinks=sinks)
        expected = oracle(query, paged, scale, window, None, soft_cap, sinks)
        assert relative_error(out, expected) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0]]))
def test_rows_of_padding_stay_unwritten(shape: Shape, device: str) -> None:
    paged, query = paged_kv([40, 7, 33], shape, device), make_query(shape, 3, device)
    paged.seq_lens[1] = 0
    paged.rows[1] = -1
    # A row of -1 lies in front of the table: padding reads nothing of it.
    padded = torch.cat((paged.block_table[:1], paged.block_table))
    out = poisoned(*query.shape, dtype=shape.dtype, device=device)
    workspace = make_workspace(shape, 3, device)
    cuts = cut_for_decode(paged.seq_lens, paged.cache, query.dtype)
    decode_attention(query, paged.cache, padded[1:], paged.rows, cuts, 0.1, workspace, out=out)
    assert out[1].isnan().all()
    live = torch.tensor([0, 2], device=device)
    own = Paged(paged.cache, paged.block_table, paged.rows[live], paged.seq_lens[live])
    assert relative_error(out[live], oracle(query[live], own, 0.1)) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:2], [GRID[0], GRID[5], GRID[6], GRID[10]]))
def test_keys_and_values_in_8_bits_count_with_their_heads_scale(shape: Shape, device: str) -> None:
    lengths = [1, shape.block_size + 1, 130] if device == "cpu" else edge_lengths(shape.block_size)
    for programs in PROGRAMS:
        assert decode_error(shape, lengths, device, programs, cache_dtype=FP8) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], [GRID[0], GRID[11]]))
def test_a_batch_invariant_result_is_bit_identical_alone_and_among_others(shape: Shape, device: str) -> None:
    lengths = [1, 70, 300] if device == "cpu" else [*edge_lengths(shape.block_size), *ragged_lengths(200, 9000)]
    num_seqs = len(lengths)
    paged, query = paged_kv(lengths, shape, device), make_query(shape, num_seqs, device)
    workspace = make_workspace(shape, num_seqs, device, batch_invariant=True)

    def attend_to(picked: Tensor) -> Tensor:
        own = Paged(paged.cache, paged.block_table, paged.rows[picked], paged.seq_lens[picked])
        cuts = cut_for_decode(own.seq_lens, own.cache, query.dtype, batch_invariant=True)
        return attend(query[picked], own, cuts, 0.1, workspace)

    together = attend_to(torch.arange(num_seqs, device=device))
    assert relative_error(together, oracle(query, paged, 0.1)) <= BOUNDS[shape.dtype]
    for first in range(0, num_seqs, max(1, num_seqs // 20)):
        for others in (1, 2, 7):
            picked = torch.arange(first, min(first + others, num_seqs), device=device)
            assert torch.equal(attend_to(picked), together[picked])


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0]], []))
def test_a_workspace_that_is_too_small_is_refused(shape: Shape, device: str) -> None:
    paged, query = paged_kv([300, 5], shape, device), make_query(shape, 2, device)
    cuts = cut_sequences(paged.seq_lens, shape.num_kv_heads, 64 * shape.num_kv_heads)
    with pytest.raises(ValueError, match="65 pieces of 2 sequences need 520 rows and 4 counters of workspace, it has"):
        attend(query, paged, cuts, 0.1, DecodeWorkspace(1, 8, 2, shape.head_dim, torch.device(device)))


def pieces_of(cuts: DecodeCuts) -> list[list[tuple[int, int]]]:
    """Each sequence's pieces, from token to token; their numbers and counts are looked at."""
    found: dict[int, list[tuple[int, int]]] = {}
    for seq, first, last, packed in cuts.pieces.tolist():
        if seq >= 0:
            own = found.setdefault(seq, [])
            assert packed & 0xFFFF == len(own)
            own.append((first, last))
    for seq, _, _, packed in cuts.pieces.tolist():
        assert seq < 0 or packed >> 16 == len(found[seq])
    return [found.get(seq, []) for seq in range(max(found, default=-1) + 1)]


@pytest.mark.parametrize("device", DEVICES)
def test_equal_sequences_are_cut_alike_and_one_among_short_ones_is_cut_finely(device: str) -> None:
    def cut(lengths: list[int], programs: int, window: int = 0) -> list[list[tuple[int, int]]]:
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        return pieces_of(cut_sequences(lens, 8, programs, window=window))

    assert cut([8192], 132) == [[(at, at + 512) for at in range(0, 8192, 512)]]
    assert cut([640] * 16, 132) == [[(0, 640)]] * 16
    assert cut([600, 700, 640, 500], 32) == [[(0, 600)], [(0, 700)], [(0, 640)], [(0, 500)]]
    mixed = cut([640] * 15 + [32_768], 132)
    assert mixed[:15] == [[(0, 640)]] * 15
    assert len(mixed[15]) == 12
    assert max(last - first for first, last in mixed[15]) == 2816
    assert mixed[15][-1][1] == 32_768
    assert cut([0, 10, 0, 300], 132) == [[], [(0, 10)], [], [(0, 256), (256, 300)]]
    assert cut([1000, 2000], 16, 100) == [[(900, 1000)], [(1900, 2000)]]
    assert cut([0, 0], 132) == []


@pytest.mark.parametrize("device", DEVICES)
def test_cuts_by_length_do_not_depend_on_other_sequences(device: str) -> None:
    lengths = [1, 256, 257, 4096, 5000, 131_072]
    alone = [pieces_of(cut_sequences(torch.tensor([n], dtype=torch.int32, device=device), 8, 0)) for n in lengths]
    together = pieces_of(cut_sequences(torch.tensor(lengths, dtype=torch.int32, device=device), 8, 0))
    assert [own for (own,) in alone] == together
    assert max(map(len, together)) == INVARIANT_PIECES


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_cover_every_sequence_once(device: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 131_072), min_size=1, max_size=12))
    heads = data.draw(st.sampled_from([1, 2, 8, 32]))
    programs = data.draw(st.sampled_from([0, 16, 132, 528]))
    window = data.draw(st.sampled_from([0, 1, 128, 5000]))
    cuts = cut_sequences(torch.tensor(lengths, dtype=torch.int32, device=device), heads, programs, window=window)
    assert len(cuts.pieces) == max_pieces(len(lengths), heads, programs)
    own = pieces_of(cuts)
    assert len(own) <= len(lengths)
    for length, pieces in zip(lengths, own + [[]] * (len(lengths) - len(own)), strict=True):
        start = max(length - window, 0) if window else 0
        assert [first for first, _ in pieces] == [start, *(last for _, last in pieces[:-1])][: len(pieces)]
        assert (pieces[-1][1] if pieces else 0) == length
