"""Tiles of pairs against their definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.worker.adapters.pairs import pair_tiles

NUM_SLOTS, NUM_EXPERTS, TOP_K = 3, 5, 2
_PAIR = st.tuples(st.integers(-1, NUM_SLOTS - 1), st.permutations(range(NUM_EXPERTS)))


@given(st.lists(_PAIR, min_size=1, max_size=60))
def test_tiles_have_every_pair_once_beside_those_of_its_adapter_and_expert(rows: list[tuple[int, list[int]]]) -> None:
    ids = torch.tensor([experts[:TOP_K] for _, experts in rows])
    slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int32)
    found = pair_tiles(ids, slots, NUM_SLOTS, NUM_EXPERTS)
    seen: list[int] = []
    for slot, expert, first, count in found.tiles.tolist():
        assert 0 <= count <= found.tile_rows
        pairs = found.order[first : first + count].tolist()
        assert all(int(slots[pair // TOP_K]) == slot for pair in pairs)
        assert slot < 0 or all(int(ids.flatten()[pair]) == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(ids.numel()))
    numbered = found.numbered(7)
    assert numbered.tiles[:, 0].tolist() == [
        -1 if slot < 0 else slot * 7 + expert for slot, expert, _, _ in found.tiles.tolist()
    ]
