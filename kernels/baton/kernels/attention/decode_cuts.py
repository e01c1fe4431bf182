"""Cuts sequences into pieces for decode attention, once per step, on the device, because the host has no lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

GRANULE = 128  # tokens: the length of a piece is a multiple of it, and at least twice it
MAX_PIECES = 128  # of a sequence
# For batch-invariant cuts, which depend only on a sequence's length, as does the order of its sums.
INVARIANT_PIECES = 16
_PER_PROGRAM = 8  # pieces that one program writes
_LEAST_PAD = 128  # sequences; each power of two is another specialization


@dataclass(frozen=True, slots=True)
class DecodeCuts:
    """`pieces` [max_pieces, 4] int32: sequence (-1: no piece), first token, end, and index | count << 16.

    The pieces of a sequence are consecutive; padding has none. `programs` is the number that they were cut for.
    """

    pieces: Tensor
    programs: int


@triton.jit(
    do_not_specialize=["num_seqs", "max_pieces", "window", "programs"], do_not_specialize_on_alignment=["seq_lens_ptr"]
)
def _cut_kernel(
    pieces_ptr,  # [max_pieces, 4] int32
    seq_lens_ptr,  # [num_seqs] int32; 0: padding
    num_seqs,
    max_pieces,
    window,  # keys that a query attends to, including its own; 0: all
    programs,  # over all KV heads; 0: cut by length only
    num_kv_heads,
    SEQS_PAD: tl.constexpr,
    GRANULE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """pieces of sequence i = max(1, floor(length_i * programs / (num_kv_heads * sum of lengths))), at most MOST"""
    # grid: (max_pieces / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seqs = tl.arange(0, SEQS_PAD)
    length = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    seen = tl.where(window > 0, tl.minimum(length, window), length)
    if programs == 0:
        wanted = tl.full([SEQS_PAD], MOST, tl.int32)
    else:
        total = tl.maximum(tl.sum(seen.to(tl.int64), 0), 1)
        wanted = (seen.to(tl.int64) * programs // (total * num_kv_heads)).to(tl.int32)
        wanted = tl.minimum(tl.maximum(wanted, 1), MOST)
    share = tl.maximum(tl.cdiv(tl.cdiv(seen, wanted), GRANULE), 2) * GRANULE
    count = tl.cdiv(seen, share)
    end = tl.cumsum(count, 0)
    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((end[None, :] <= piece[:, None]).to(tl.int32), 1)
    mine = (owner[:, None] == seqs[None, :]).to(tl.int32)
    number = piece - tl.sum(mine * (end - count)[None, :], 1)
    own_share = tl.sum(mine * share[None, :], 1)
    own_length = tl.sum(mine * length[None, :], 1)
    first = own_length - tl.sum(mine * seen[None, :], 1) + number * own_share
    packed = number | tl.sum(mine * count[None, :], 1) << 16
    at = pieces_ptr + piece * 4
    inside = piece < max_pieces
    tl.store(at, tl.where(owner < num_seqs, owner, -1), mask=inside)
    tl.store(at + 1, first, mask=inside)
    tl.store(at + 2, tl.minimum(first + own_share, own_length), mask=inside)
    tl.store(at + 3, packed, mask=inside)


def cut_sequences(seq_lens: Tensor, num_kv_heads: int, programs: int, *, window: int = 0) -> DecodeCuts:
    """Cuts sequences of seq_lens [num_seqs] int32 into about `programs` pieces of similar length, over all KV heads.

    Sequences of at most two shares are not cut. `window` > 0 limits the tokens to the last ones. With 0 programs, cuts
    depend only on a sequence's own length.
    """
    num_seqs = seq_lens.shape[0]
    most = max_pieces(num_seqs, num_kv_heads, programs)
    pieces = torch.empty(most, 4, dtype=torch.int32, device=seq_lens.device)
    overlap = overlaps(seq_lens)
    _cut_kernel[(triton.cdiv(most, _PER_PROGRAM),)](
        pieces,
        seq_lens,
        num_seqs,
        most,
        window,
        programs,
        num_kv_heads,
        SEQS_PAD=max(_LEAST_PAD, triton.next_power_of_2(num_seqs)),
        GRANULE=GRANULE,
        MOST=MAX_PIECES if programs else INVARIANT_PIECES,
        BLOCK=_PER_PROGRAM,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return DecodeCuts(pieces, programs)


def max_pieces(num_seqs: int, num_kv_heads: int, programs: int) -> int:
    """Returns the most pieces that sequences of any lengths can have."""
    if programs == 0:
        return num_seqs * INVARIANT_PIECES
    return num_seqs - 1 + max(1, min(programs // num_kv_heads, num_seqs * MAX_PIECES))
