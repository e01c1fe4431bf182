"""Layers, shapes and bytes of a cache with groups."""

import pytest

from baton.worker.kv_spec import KvGroup, KvKind, KvSpec, full_spec

FULL = KvGroup(KvKind.FULL, (2, 5), "bfloat16", num_kv_heads=8, head_dim=128)
WINDOW = KvGroup(KvKind.WINDOW, (0, 1, 3, 4), "float8_e4m3", num_kv_heads=4, head_dim=64, window=512)
LATENT = KvGroup(KvKind.LATENT, (6,), "bfloat16", num_kv_heads=1, head_dim=576)
STATE = KvGroup(KvKind.STATE, (7, 8), "float32", num_kv_heads=16, head_dim=64 * 128)
SPEC = KvSpec(bytes(16), 16, (FULL, WINDOW, LATENT, STATE))


def test_layers_are_numbered_group_by_group():
    assert SPEC.num_layers == 9
    assert SPEC.spans == (range(2), range(2, 6), range(6, 7), range(7, 9))
    assert [SPEC.group_of(layer) for layer in range(9)] == [0, 0, 1, 1, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("group", "shape", "num_bytes"),
    [
        (FULL, (2, 8, 16, 128), 2 * 8 * 16 * 128 * 2),
        (WINDOW, (2, 4, 16, 64), 2 * 4 * 16 * 64),
        (LATENT, (1, 1, 16, 576), 16 * 576 * 2),
        (STATE, (1, 16, 1, 8192), 16 * 8192 * 4),  # whatever the block's tokens
    ],
)
def test_a_block_has_the_shape_of_its_kind(group, shape, num_bytes):
    assert SPEC.block_shape(group) == shape
    assert SPEC.bytes_per_block_layer(group) == num_bytes


def test_a_block_is_all_layers_whose_memory_grows_with_the_tokens():
    assert SPEC.bytes_per_block == sum(SPEC.layer_bytes(layer) for layer in range(7))
    assert SPEC.largest_layer_bytes == SPEC.bytes_per_block_layer(STATE)


def test_a_rank_holds_its_share_of_each_group():
    rank = KvSpec(bytes(16), 16, SPEC.groups, tp_size=8, tp_rank=3)
    assert [rank.num_rank_heads(group) for group in rank.groups] == [1, 1, 1, 2]
    assert rank.block_shape(FULL) == (2, 1, 16, 128)
    assert rank.bytes_per_block_layer(STATE, num_heads=1) == 8192 * 4


def test_a_model_whose_layers_are_alike_has_one_full_group():
    spec = full_spec(bytes(16), "float16", num_layers=3, num_kv_heads=2, head_dim=4, block_size=8)
    (group,) = spec.groups
    assert (group.kind, group.layers) == (KvKind.FULL, (0, 1, 2))
    assert spec.bytes_per_block == 3 * 2 * 2 * 8 * 4 * 2
