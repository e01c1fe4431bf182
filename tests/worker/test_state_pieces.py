"""The pieces of states in pages: they fit, they do not overlap, and no page is taken in vain."""

from __future__ import annotations

import itertools

import pytest

from baton.rpc.errors import Unsupported
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec
from baton.worker.state_pieces import PlacedState, StateMatrix, place_state

# Qwen3-Next: 32 value heads of 128 x 128, and the last 3 inputs of 8192 channels.
GDN = (StateMatrix(32, 128, 128), StateMatrix(1, 3, 8192))


def check(placed: PlacedState, part_values: int) -> None:
    taken: dict[int, list[range]] = {}
    for layer in placed.layers:
        for matrix in layer:
            for part, offset in zip(matrix.parts, matrix.offsets, strict=True):
                taken.setdefault(part, []).append(range(offset, offset + matrix.rows * matrix.width))
    assert sorted(taken) == list(range(placed.num_parts))
    for ranges in taken.values():
        assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
        assert ranges[-1].stop <= part_values
        assert all(each.start % placed.unit == 0 for each in ranges if placed.unit)


@pytest.mark.parametrize(
    "matrices", [GDN, (StateMatrix(1, 2, 2048),), (StateMatrix(48, 128, 64), StateMatrix(1, 3, 5376))]
)
@pytest.mark.parametrize("part_values", [384, 4096, 8192, 40000, 1 << 20])
def test_pieces_fill_parts_in_order_and_never_overlap(matrices: tuple[StateMatrix, ...], part_values: int) -> None:
    placed = place_state(matrices, 5, part_values)
    check(placed, part_values)
    for layer in placed.layers:
        sizes = [len(matrix.parts) * matrix.rows * matrix.width for matrix in layer]
        assert sizes == [matrix.num_values for matrix in matrices]


def test_a_state_of_qwen3_next_takes_few_more_pages_than_its_bytes() -> None:
    """12 layers with 2 KV heads of 256 in bf16: a page of 16 tokens has 393,216 bytes, a state 78.8 MB."""
    full = KvGroup(KvKind.FULL, tuple(range(3, 48, 4)), "bfloat16", 2, 256)
    layers = tuple(layer for layer in range(48) if layer % 4 != 3)
    state = KvGroup(KvKind.STATE, layers, "float32", 1, sum(m.num_values for m in GDN), matrices=GDN)
    spec = KvSpec(bytes(16), 16, (full, state))
    least = -(-len(layers) * 4 * state.head_dim // spec.page_bytes)
    assert spec.page_bytes == 393_216
    assert least <= spec.pages_each(state) <= least * 1.02
    assert spec.bytes_per_block == spec.page_bytes
    assert spec.most_tokens(1000, 2048) == (1000 - 2 * spec.pages_each(state)) * 16


def test_a_column_that_fits_in_no_part_names_the_block_size() -> None:
    with pytest.raises(Unsupported, match="raise block_size"):
        place_state((StateMatrix(1, 128, 8),), 1, 100)


def test_groups_of_tokens_of_two_shapes_leave_no_page_for_states() -> None:
    groups = (
        KvGroup(KvKind.FULL, (0,), "float32", 2, 8),
        KvGroup(KvKind.WINDOW, (1,), "float32", 4, 8, window=9),
        KvGroup(KvKind.STATE, (2,), "float32", 1, 64, matrices=(StateMatrix(1, 8, 8),)),
    )
    with pytest.raises(Unsupported, match="pages of one size"):
        KvSpec(bytes(16), 4, groups)
