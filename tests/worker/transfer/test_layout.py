import dataclasses

import pytest

from baton.rpc.errors import Mismatch
from baton.v1 import kv_pb2
from baton.worker.kv_spec import KvGroup, KvKind, KvSpec, full_spec
from baton.worker.transfer.layout import check_convertible, layout_message, spec_of

FIELDS = {
    "model_digest": bytes(range(16)),
    "dtype": "bfloat16",
    "num_layers": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
}
SPEC = full_spec(**FIELDS)


def spec(**values) -> KvSpec:
    """SPEC with other values."""
    return full_spec(**{**FIELDS, **values})


EIGHT_BITS = spec(dtype="float8_e4m3", kv_scales=tuple(0.25 + layer for layer in range(64)))
WINDOW = KvGroup(KvKind.WINDOW, (0, 1, 3, 4), "bfloat16", 4, 64, window=512)
FULL = KvGroup(KvKind.FULL, (2, 5), "bfloat16", 8, 128)
HYBRID = KvSpec(bytes(16), 16, (FULL, WINDOW))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "simulated"])
def test_a_layout_survives_the_wire(dtype):
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
    num_bytes = 8 * 16 if dtype == "simulated" else 2 * 8 * 16 * 128 * sizes[dtype]
    arrived = spec_of(layout_message(spec(dtype=dtype)))
    assert arrived == spec(dtype=dtype)
    assert arrived.layer_bytes(0) == num_bytes


def test_scales_survive_the_wire_bit_by_bit():
    assert spec_of(layout_message(EIGHT_BITS)) == EIGHT_BITS


@pytest.mark.parametrize(("tp_size", "share"), [(4, 4), (8, 8), (16, 8), (32, 8)])
def test_a_rank_has_its_share_of_the_heads_and_at_least_one(tp_size, share):
    arrived = spec_of(layout_message(spec(tp_size=tp_size, tp_rank=3)))
    assert arrived == spec(tp_size=tp_size, tp_rank=3)
    assert arrived.layer_bytes(0) == SPEC.layer_bytes(0) // share


def test_a_missing_tp_size_is_one():
    message = layout_message(SPEC)
    message.tp_size = 0
    assert spec_of(message) == SPEC


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("dtype", 99, "number 99"),
        ("dtype", 0, "number 0"),
        ("num_layers", 0, "num_layers=0"),
        ("num_layers", 2**32 - 1, "the maximum is 65536"),
        ("num_kv_heads", 0, "num_kv_heads=0"),
        ("head_dim", 0, "head_dim=0"),
        ("block_size", 0, "block_size=0"),
        ("block_size", 2**32 - 1, "at most 67108864"),
        ("tp_size", 3, "8 KV heads are on 3 ranks"),
        ("tp_rank", 1, "rank 1 of 1"),
    ],
)
def test_a_layout_that_is_none_is_refused_by_name(field, value, said):
    message = layout_message(SPEC)
    setattr(message, field, value)
    with pytest.raises(Mismatch, match=said) as caught:
        spec_of(message)
    assert caught.value.field == f"layout.{field}"


def test_an_empty_layout_is_refused():
    with pytest.raises(Mismatch):
        spec_of(kv_pb2.KvLayout())


@pytest.mark.parametrize(
    ("scales", "said"),
    [([1.0], "1 kv_scales"), ([0.0] * 64, "scale of 0"), ([float("nan")] * 64, "nan"), ([float("inf")] * 64, "inf")],
)
def test_scales_that_cannot_be_are_refused(scales, said):
    message = layout_message(EIGHT_BITS)
    del message.kv_scales[:]
    message.kv_scales.extend(scales)
    with pytest.raises(Mismatch, match=said) as caught:
        spec_of(message)
    assert caught.value.field == "layout.kv_scales"


def test_scales_belong_to_8_bits():
    message = layout_message(SPEC)
    message.kv_scales.extend([1.0] * 64)
    with pytest.raises(Mismatch, match="bfloat16"):
        spec_of(message)


def test_equal_layouts_fit():
    check_convertible(SPEC, spec_of(layout_message(SPEC)))


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 64},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"tp_size": 2, "tp_rank": 1},
    ],
)
def test_convertible_layouts_fit_in_both_directions(values):
    other = spec(**values)
    check_convertible(SPEC, other)
    check_convertible(other, SPEC)


def test_8_bits_fit_wider_ones_and_themselves():
    check_convertible(SPEC, EIGHT_BITS)
    check_convertible(EIGHT_BITS, SPEC)
    check_convertible(EIGHT_BITS, EIGHT_BITS)


@pytest.mark.parametrize(
    ("field", "value", "here", "there"),
    [
        ("model_digest", bytes(16), "model_digest=000102030405060708090a0b0c0d0e0f", "model_digest=" + "00" * 16),
        ("dtype", "simulated", "dtype=bfloat16", "dtype=simulated"),
        ("num_layers", 28, "num_layers=32", "num_layers=28"),
        ("num_kv_heads", 4, "num_kv_heads=8", "num_kv_heads=4"),
        ("head_dim", 64, "head_dim=128", "head_dim=64"),
    ],
)
def test_unsupported_layouts_are_named_on_both_sides(field, value, here, there):
    other = spec(**{field: value})
    with pytest.raises(Mismatch) as caught:
        check_convertible(SPEC, other)
    assert f"the prefill worker has {here}, the decode worker has {there}" in caught.value.message
    assert caught.value.field == f"layout.{field}"
    with pytest.raises(Mismatch) as turned:
        check_convertible(other, SPEC)
    assert f"the prefill worker has {there}, the decode worker has {here}" in turned.value.message


def test_every_difference_is_named():
    with pytest.raises(Mismatch, match=r"num_layers=32, head_dim=128.*num_layers=2, head_dim=32"):
        check_convertible(SPEC, spec(num_layers=2, head_dim=32, block_size=32))


def test_8_bits_of_other_scales_do_not_fit():
    other = spec(dtype="float8_e4m3", kv_scales=(0.5,) * 64)
    with pytest.raises(Mismatch, match="kv_scales"):
        check_convertible(EIGHT_BITS, other)


# Groups.


def test_a_cache_of_groups_survives_the_wire():
    assert spec_of(layout_message(HYBRID)) == HYBRID


def test_one_full_group_is_published_in_the_older_format():
    message = layout_message(SPEC)
    assert not message.groups
    assert (message.num_layers, message.num_kv_heads, message.head_dim) == (32, 8, 128)


def test_a_worker_without_support_for_groups_refuses_them():
    message = layout_message(HYBRID)
    message.ClearField("groups")  # as such a worker reads it
    with pytest.raises(Mismatch, match="number 0"):
        spec_of(message)


@pytest.mark.parametrize(
    ("index", "values", "said"),
    [
        (0, {"kind": 99}, "kind number 99"),
        (0, {"kind": 0}, "kind number 0"),
        (0, {"dtype": 99}, "number 99"),
        (0, {"num_kv_heads": 0}, "no heads"),
        (0, {"head_dim": 0}, "no values"),
        (0, {"window": 4}, "full group of the peer has window=4"),
        (1, {"window": 0}, "window group of the peer has window=0"),
        (1, {"layers": []}, "no layers"),
        (1, {"layers": [0, 1, 2, 3]}, "each layer once"),
        (1, {"layers": [0, 1, 3, 7]}, "each layer once"),
        (1, {"layers": range(65535)}, "65537 layers; the maximum is 65536"),
        (1, {"kv_scales": [1.0]}, "1 kv_scales"),
    ],
)
def test_a_group_that_is_none_is_refused(index, values, said):
    message = layout_message(HYBRID)
    for name, value in values.items():
        message.groups[index].ClearField(name)
        message.groups[index].MergeFrom(kv_pb2.KvGroup(**{name: value}))
    with pytest.raises(Mismatch, match=said):
        spec_of(message)


def test_groups_are_compared_one_by_one():
    check_convertible(HYBRID, dataclasses.replace(HYBRID, block_size=64))
    narrow = dataclasses.replace(HYBRID, groups=(FULL, dataclasses.replace(WINDOW, window=128)))
    with pytest.raises(Mismatch, match=r"groups\[1\]\.window=512, the decode worker has groups\[1\]\.window=128"):
        check_convertible(HYBRID, narrow)
    with pytest.raises(Mismatch, match=r"has groups=2, the decode worker has groups=1"):
        check_convertible(HYBRID, dataclasses.replace(HYBRID, groups=(FULL,)))


def test_states_convert_between_blocks_of_any_size():
    state = KvGroup(KvKind.STATE, tuple(range(4)), "float32", 1, 128 * 64)
    spec = KvSpec(bytes(16), 16, (state,))
    check_convertible(spec, dataclasses.replace(spec, block_size=64))
    other = dataclasses.replace(spec, groups=(dataclasses.replace(state, head_dim=64),))
    with pytest.raises(Mismatch, match="head_dim=8192, the decode worker has head_dim=64"):
        check_convertible(spec, other)
