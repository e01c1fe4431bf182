"""The tiles of a step's rows, and the memory of packed adapters, against their definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.worker.adapters.adapter import ALIGNMENT, PartWeights, packed_adapter, packed_size
from baton.worker.adapters.base_model import BaseModel
from baton.worker.adapters.rows import NO_SLOT, most_tiles, rows_of
from baton.worker.adapters.site import Site
from baton.worker.quantization.base import Part

NUM_SLOTS = 6


@given(st.lists(st.integers(NO_SLOT, NUM_SLOTS - 1), min_size=1, max_size=200), st.sampled_from([1, 3, 16, 64]))
def test_tiles_have_every_row_once_beside_those_of_its_slot(slots: list[int], tile_rows: int) -> None:
    order, tiles = rows_of(np.array(slots, np.int32), tile_rows)
    seen: list[int] = []
    for slot, start, count in tiles.tolist():
        assert 1 <= count <= tile_rows
        rows = order[start : start + count].tolist()
        assert [slots[row] for row in rows] == [slot] * count
        seen += rows
    assert sorted(seen) == list(range(len(slots)))
    assert len(tiles) <= most_tiles(len(slots), NUM_SLOTS, tile_rows)


def test_packed_matrices_are_aligned_views_of_one_memory() -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    weights = {
        "qkv": {0: PartWeights(random(3, 10), random(7, 3), 2.0), 2: PartWeights(random(5, 10), random(9, 5), 0.5)},
        "o": {0: PartWeights(random(3, 7), random(10, 3), 1.0)},
    }
    sites = [
        Site("first", (Part("first", 4),), 10),
        Site("qkv", (Part("q", 7), Part("k", 9), Part("v", 9)), 10),
        Site("o", (Part("o", 10),), 7),
    ]
    packed = packed_adapter(bytes(16), 5, weights, BaseModel("Tiny", sites, "first"), torch.float32)
    places = []
    for name, site in weights.items():
        for index, part in site.items():
            own = packed.weights[name][index]
            assert torch.equal(own.a, part.a)
            assert torch.equal(own.b, part.b)
            assert own.scale == part.scale
            for matrix, transposed in ((own.a, own.a), (own.b, own.b.t())):
                assert matrix.untyped_storage().data_ptr() == packed.memory.untyped_storage().data_ptr()
                assert transposed.is_contiguous()
                places.append(int(matrix.storage_offset()))
            column = {"qkv": 1, "o": 4}[name] + index
            assert packed.tables.offsets[column].tolist() == places[-2:]
            assert (int(packed.tables.ranks[column]), float(packed.tables.scales[column])) == (own.rank, own.scale)
    assert packed.tables.ranks.tolist() == [0, 3, 0, 5, 3, 0]
    assert all(place % ALIGNMENT == 0 for place in places)
    assert len(set(places)) == len(places)
    assert len(packed.memory) == packed_size([(3, 10, 7), (5, 10, 9), (3, 7, 10)])
    assert packed.num_bytes == 4 * sum(p.a.numel() + p.b.numel() for site in weights.values() for p in site.values())
