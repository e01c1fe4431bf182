import dataclasses

import pytest

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2
from baton.worker.executors.base import KvLayout
from baton.worker.transfer.layout import check_convertible, layout_message, layout_of

LAYOUT = KvLayout(
    model_digest=bytes(range(16)),
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    bytes_per_block_layer=2 * 8 * 16 * 128 * 2,
)
EIGHT_BITS = dataclasses.replace(
    LAYOUT,
    dtype="float8_e4m3",
    bytes_per_block_layer=LAYOUT.bytes_per_block_layer // 2,
    kv_scales=tuple(0.25 + layer for layer in range(64)),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "simulated"])
def test_a_layout_survives_the_wire(dtype):
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
    num_bytes = 8 * 16 if dtype == "simulated" else 2 * 8 * 16 * 128 * sizes[dtype]
    layout = dataclasses.replace(LAYOUT, dtype=dtype, bytes_per_block_layer=num_bytes)
    assert layout_of(layout_message(layout)) == layout


def test_scales_survive_the_wire_bit_by_bit():
    assert layout_of(layout_message(EIGHT_BITS)) == EIGHT_BITS


@pytest.mark.parametrize(("tp_size", "share"), [(4, 4), (8, 8), (16, 8), (32, 8)])
def test_a_rank_has_its_share_of_the_heads_and_at_least_one(tp_size, share):
    num_bytes = LAYOUT.bytes_per_block_layer // share
    layout = dataclasses.replace(LAYOUT, tp_size=tp_size, tp_rank=3, bytes_per_block_layer=num_bytes)
    assert layout_of(layout_message(layout)) == layout


def test_a_missing_tp_size_is_one():
    message = layout_message(LAYOUT)
    message.tp_size = 0
    assert layout_of(message) == LAYOUT


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", 99, "number 99"),
        ("dtype", 0, "number 0"),
        ("num_layers", 0, "num_layers=0"),
        ("num_kv_heads", 0, "num_kv_heads=0"),
        ("head_dim", 0, "head_dim=0"),
        ("block_size", 0, "block_size=0"),
        ("block_size", 2**32 - 1, "at most 67108864"),
        ("tp_size", 3, "8 KV heads are on 3 ranks"),
        ("tp_rank", 1, "rank 1 of 1"),
    ],
)
def test_a_layout_that_is_none_is_refused_by_name(field, value, said):
    message = layout_message(LAYOUT)
    setattr(message, field, value)
    with pytest.raises(Mismatch, match=said) as caught:
        layout_of(message)
    assert caught.value.field == f"layout.{field}"


def test_an_empty_layout_is_refused():
    with pytest.raises(Mismatch):
        layout_of(kv_pb2.KvLayout())


@pytest.mark.parametrize(
    ("scales", "said"),
    [([1.0], "1 kv_scales"), ([0.0] * 64, "scale of 0"), ([float("nan")] * 64, "nan"), ([float("inf")] * 64, "inf")],
)
def test_scales_that_cannot_be_are_refused(scales, said):
    message = layout_message(EIGHT_BITS)
    del message.kv_scales[:]
    message.kv_scales.extend(scales)
    with pytest.raises(Mismatch, match=said) as caught:
        layout_of(message)
    assert caught.value.field == "layout.kv_scales"


def test_scales_belong_to_8_bits():
    message = layout_message(LAYOUT)
    message.kv_scales.extend([1.0] * 64)
    with pytest.raises(Mismatch, match="bfloat16"):
        layout_of(message)


def test_equal_layouts_fit():
    check_convertible(LAYOUT, layout_of(layout_message(LAYOUT)))


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 64, "bytes_per_block_layer": 4 * LAYOUT.bytes_per_block_layer},
        {"dtype": "float32", "bytes_per_block_layer": 2 * LAYOUT.bytes_per_block_layer},
        {"dtype": "float16"},
        {"tp_size": 2, "tp_rank": 1, "bytes_per_block_layer": LAYOUT.bytes_per_block_layer // 2},
    ],
)
def test_what_can_be_converted_fits_both_ways(values):
    other = dataclasses.replace(LAYOUT, **values)
    check_convertible(LAYOUT, other)
    check_convertible(other, LAYOUT)


def test_8_bits_fit_wider_ones_and_themselves():
    check_convertible(LAYOUT, EIGHT_BITS)
    check_convertible(EIGHT_BITS, LAYOUT)
    check_convertible(EIGHT_BITS, EIGHT_BITS)


@pytest.mark.parametrize(
    ("field", "value", "here", "there"),
    [
        ("model_digest", bytes(16), "model_digest=000102030405060708090a0b0c0d0e0f", "model_digest=" + "00" * 16),
        ("dtype", "simulated", "dtype=bfloat16", "dtype=simulated"),
        ("num_layers", 28, "num_layers=32", "num_layers=28"),
        ("num_kv_heads", 4, "num_kv_heads=8", "num_kv_heads=4"),
        ("head_dim", 64, "head_dim=128", "head_dim=64"),
        ("bytes_per_block_layer", 1, "bytes_per_block_layer=65536", "bytes_per_block_layer=1"),
    ],
)
def test_what_cannot_be_converted_is_named_on_both_sides(field, value, here, there):
    other = dataclasses.replace(LAYOUT, **{field: value})
    with pytest.raises(Mismatch) as caught:
        check_convertible(LAYOUT, other)
    assert f"the prefill worker has {here}, the decode worker has {there}" in caught.value.message
    assert caught.value.field == f"layout.{field}"
    with pytest.raises(Mismatch) as turned:
        check_convertible(other, LAYOUT)
    assert f"the prefill worker has {there}, the decode worker has {here}" in turned.value.message


def test_every_difference_is_named():
    with pytest.raises(Mismatch, match=r"num_layers=32, head_dim=128.*num_layers=2, head_dim=32"):
        check_convertible(LAYOUT, dataclasses.replace(LAYOUT, num_layers=2, head_dim=32, block_size=32))


def test_8_bits_of_other_scales_do_not_fit():
    other = dataclasses.replace(EIGHT_BITS, kv_scales=(0.5,) * 64)
    with pytest.raises(Mismatch, match="kv_scales"):
        check_convertible(EIGHT_BITS, other)
