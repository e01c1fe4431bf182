"""Cuts sequences of latents into pieces, so that programs which loop over pieces finish together. On the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.kernels.overlap import overlaps

TILE = 64  # tokens: pieces begin at multiples of a tile
_LEAST = 128  # tokens of a program's share: shorter pieces cost more to merge than they save
_PER_PROGRAM = 8  # pieces that one program writes
_LEAST_PAD = 128  # sequences; each power of two is another specialization


@dataclass(frozen=True, slots=True)
class LatentCuts:
    """The pieces of each sequence, and of each program.

    `pieces` [max_pieces, 4] int32: sequence (-1: no piece), first token, end, and index | count << 16. The pieces of a
    sequence are consecutive, as are those of a program; padding has none. `turns` [programs + 1] int32: each program's
    first piece. `spans` [num_seqs, 2] int32: each sequence's first piece and number of pieces.
    """

    pieces: Tensor
    turns: Tensor
    spans: Tensor

    @property
    def programs(self) -> int:
        return len(self.turns) - 1


@triton.jit(do_not_specialize=["num_seqs", "max_pieces", "programs"], do_not_specialize_on_alignment=["seq_lens_ptr"])
def _cut_kernel(
    pieces_ptr,  # [max_pieces, 4] int32
    turns_ptr,  # [programs + 1] int32
    spans_ptr,  # [num_seqs, 2] int32
    seq_lens_ptr,  # [num_seqs] int32; 0: padding
    num_seqs,
    max_pieces,
    programs,
    SEQS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """program p computes tiles [p share, (p + 1) share) of all sequences' tiles, one sequence after another"""
    # grid: (max(max_pieces, programs + 1) / BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    seqs = tl.arange(0, SEQS_PAD)
    length = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
    tiles = tl.cdiv(length, TILE)
    end = tl.cumsum(tiles, 0)
    start = end - tiles
    num_tiles = tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(num_tiles, programs), LEAST)
    first_program = start // share
    count = tl.where(tiles > 0, (end - 1) // share - first_program + 1, 0)
    last_piece = tl.cumsum(count, 0)
    first_piece = last_piece - count

    if tl.program_id(0) == 0:
        tl.store(spans_ptr + seqs * 2, first_piece, mask=seqs < num_seqs)
        tl.store(spans_ptr + seqs * 2 + 1, count, mask=seqs < num_seqs)

    piece = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((last_piece[None, :] <= piece[:, None]).to(tl.int32), 1)
    mine = (owner[:, None] == seqs[None, :]).to(tl.int32)
    number = piece - tl.sum(mine * first_piece[None, :], 1)
    own_start = tl.sum(mine * start[None, :], 1)
    own_length = tl.sum(mine * length[None, :], 1)
    program = tl.sum(mine * first_program[None, :], 1) + number
    first = tl.maximum(program * share - own_start, 0) * TILE
    last = tl.minimum(((program + 1) * share - own_start) * TILE, own_length)
    packed = number | tl.sum(mine * count[None, :], 1) << 16
    at = pieces_ptr + piece * 4
    inside = piece < max_pieces
    tl.store(at, tl.where(owner < num_seqs, owner, -1), mask=inside)
    tl.store(at + 1, first, mask=inside)
    tl.store(at + 2, last, mask=inside)
    tl.store(at + 3, packed, mask=inside)

    # Of program `piece`, the first tile's sequence and the pieces before it.
    tile = piece * share
    ended = (end[None, :] <= tile[:, None]).to(tl.int32)
    holder = ((start[None, :] <= tile[:, None]) & (end[None, :] > tile[:, None])).to(tl.int32)
    turn = tl.sum(ended * count[None, :], 1) + tl.sum(holder * (piece[:, None] - first_program[None, :]), 1)
    tl.store(turns_ptr + piece, turn, mask=piece <= programs)


def cut_evenly(seq_lens: Tensor, programs: int, tile: int = TILE) -> LatentCuts:
    """Cuts sequences of seq_lens [num_seqs] int32 for `programs` programs, each of which gets as many tiles of `tile`
    tokens."""
    num_seqs = seq_lens.shape[0]
    most = max_pieces(num_seqs, programs)
    pieces = torch.empty(most, 4, dtype=torch.int32, device=seq_lens.device)
    turns = torch.empty(programs + 1, dtype=torch.int32, device=seq_lens.device)
    spans = torch.empty(num_seqs, 2, dtype=torch.int32, device=seq_lens.device)
    overlap = overlaps(seq_lens)
    _cut_kernel[(triton.cdiv(max(most, programs + 1), _PER_PROGRAM),)](
        pieces,
        turns,
        spans,
        seq_lens,
        num_seqs,
        most,
        programs,
        SEQS_PAD=max(_LEAST_PAD, triton.next_power_of_2(num_seqs)),
        TILE=tile,
        LEAST=_LEAST // tile,
        BLOCK=_PER_PROGRAM,
        OVERLAP=overlap,
        launch_pdl=overlap,
    )
    return LatentCuts(pieces, turns, spans)


def max_pieces(num_seqs: int, programs: int) -> int:
    """Returns the most pieces that sequences of any lengths can have: each program and each sequence ends one."""
    return num_seqs + programs - 1
