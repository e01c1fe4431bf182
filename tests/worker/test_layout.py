import dataclasses

import pytest

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2
from baton.worker.executor.base import KvLayout
from baton.worker.transfer.layout import check_compatible, layout_message, layout_of

LAYOUT = KvLayout(
    model_digest=bytes(range(16)),
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    bytes_per_block_layer=2 * 8 * 16 * 128 * 2,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "simulated"])
def test_a_layout_survives_the_wire(dtype):
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
    num_bytes = 8 * 16 if dtype == "simulated" else 2 * 8 * 16 * 128 * sizes[dtype]
    layout = dataclasses.replace(LAYOUT, dtype=dtype, bytes_per_block_layer=num_bytes)
    assert layout_of(layout_message(layout)) == layout


def test_a_rank_has_its_share_of_the_heads():
    layout = dataclasses.replace(LAYOUT, tp_size=4, tp_rank=3, bytes_per_block_layer=LAYOUT.bytes_per_block_layer // 4)
    assert layout_of(layout_message(layout)) == layout


def test_equal_layouts_fit():
    check_compatible(LAYOUT, layout_of(layout_message(LAYOUT)))


@pytest.mark.parametrize(
    ("field", "value", "here", "there"),
    [
        ("model_digest", bytes(16), "model_digest=000102030405060708090a0b0c0d0e0f", "model_digest=" + "00" * 16),
        ("dtype", "float16", "dtype=bfloat16", "dtype=float16"),
        ("num_layers", 28, "num_layers=32", "num_layers=28"),
        ("num_kv_heads", 4, "num_kv_heads=8", "num_kv_heads=4"),
        ("head_dim", 64, "head_dim=128", "head_dim=64"),
        ("block_size", 64, "block_size=16", "block_size=64"),
        ("tp_size", 2, "tp_size=1", "tp_size=2"),
        ("tp_rank", 1, "tp_rank=0", "tp_rank=1"),
        ("bytes_per_block_layer", 1, "bytes_per_block_layer=65536", "bytes_per_block_layer=1"),
    ],
)
def test_what_differs_is_named_on_both_sides(field, value, here, there):
    with pytest.raises(Mismatch) as caught:
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, **{field: value}))
    assert f"this worker has {here}" in caught.value.message
    assert f"the peer has {there}" in caught.value.message
    assert caught.value.field == f"layout.{field}"


def test_every_difference_is_named():
    with pytest.raises(Mismatch, match=r"dtype=bfloat16, block_size=16.*dtype=float32, block_size=32"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, dtype="float32", block_size=32))


def test_a_dtype_of_a_later_version_is_a_mismatch():
    message = layout_message(LAYOUT)
    message.dtype = 99
    with pytest.raises(Mismatch, match="99"):
        layout_of(message)
    with pytest.raises(Mismatch):
        layout_of(kv_pb2.KvLayout())
