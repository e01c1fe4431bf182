"""The pieces of sequences of latents: together they are the sequences, and every program gets as many tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

LENGTHS = [[1], [32_768], [4096] * 5, [64, 0, 65, 1, 128, 5000, 0, 63], [1] * 140, [7] * 10 + [9000]]


@pytest.mark.interpreted
@pytest.mark.parametrize("programs", [1, 4, 33, 132])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{lengths[0]}")
def test_pieces_are_the_sequences_in_equal_shares(lengths: list[int], programs: int) -> None:
    from baton.kernels.attention.latent_cuts import TILE, cut_evenly, max_pieces

    cuts = cut_evenly(torch.tensor(lengths, dtype=torch.int32), programs)
    pieces, turns = cuts.pieces.tolist(), cuts.turns.tolist()
    assert (len(pieces), cuts.programs) == (max_pieces(len(lengths), programs), programs)
    real = [piece for piece in pieces if piece[0] >= 0]
    assert pieces[: len(real)] == real
    assert turns[0] == 0
    assert turns[-1] == len(real)
    assert turns == sorted(turns)
    tiles = [sum(-(-(end - first) // TILE) for _, first, end, _ in pieces[a:b]) for a, b in pairwise(turns)]
    assert max(tiles) <= max(2, -(-sum(tiles) // programs))
    spans = cuts.spans.tolist()
    for seq, length in enumerate(lengths):
        own = [(first, end, packed) for owner, first, end, packed in real if owner == seq]
        bounds = [0] + [end for _, end, _ in own]
        assert [first for first, _, _ in own] == bounds[:-1]
        assert bounds[-1] == length
        assert all(first % TILE == 0 and first < end for first, end, _ in own)
        assert [packed for _, _, packed in own] == [index | len(own) << 16 for index in range(len(own))]
        assert spans[seq][1] == len(own)
        assert not own or real[spans[seq][0]] == [seq, *own[0]]
