"""Which implementation the table chooses, on each card and for each shape."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.kernels.limits import BLOCK_SIZES, HEAD_DIMS
from baton.kernels.table import (
    DECODE,
    EXPERTS,
    FEW_EXPERTS,
    FEW_PACKED_EXPERTS,
    FEW_ROUNDED_EXPERTS,
    HOPPER_DECODE,
    HOPPER_EXPERTS,
    HOPPER_PREFILL,
    HOPPER_ROUNDED_EXPERTS,
    PREFILL,
    ROUNDED_EXPERTS,
    SMALL_ADD,
    SMALL_GATE,
    SMALL_PROJECT,
    SPLIT_EXPERTS,
    SUMMING_ADD,
    TABLE,
    Case,
    find,
)

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.device} {row.op} {row.path}")
def test_every_implementation_can_be_imported(row):
    assert callable(row.load())


@pytest.mark.parametrize("op", ["decode_attention", "prefill_attention"])
def test_every_supported_shape_has_attention_on_every_card(op):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for capability, dtype, head_dim, block_size in itertools.product((8, 9, 10, 12), dtypes, HEAD_DIMS, BLOCK_SIZES):
        for window, invariant, stored in itertools.product((False, True), (False, True), (None, FP8)):
            case = Case(
                "cuda", capability, dtype, stored, head_dim, block_size, window=window, batch_invariant=invariant
            )
            row = find(op, case)
            hopper = capability == 9 and dtype != torch.float32 and head_dim in (64, 128) and not (window or stored)
            if op == "decode_attention":
                assert (row is HOPPER_DECODE) == (hopper and block_size < 128)
            else:
                assert (row is HOPPER_PREFILL) == (hopper and not invariant)
            assert row in (HOPPER_DECODE, HOPPER_PREFILL, DECODE, PREFILL)


@pytest.mark.parametrize(("cells", "row"), [(1, HOPPER_DECODE), (264, HOPPER_DECODE), (265, DECODE)])
def test_hoppers_decode_is_for_few_sequences(cells, row):
    assert find("decode_attention", Case("cuda", 9, num_cells=cells)) is row


@pytest.mark.parametrize(
    ("capability", "pairs", "invariant", "row"),
    [
        (9, 8, False, FEW_EXPERTS),
        (8, 32, False, FEW_EXPERTS),
        (9, 40, False, EXPERTS),
        (9, 128 * 512, False, HOPPER_EXPERTS),
        (8, 128 * 512, False, EXPERTS),
        (9, 8, True, EXPERTS),
        (9, 128 * 512, True, EXPERTS),
    ],
)
def test_experts_have_kernels_by_their_load(capability, pairs, invariant, row):
    case = Case("cuda", capability, num_pairs=pairs, num_experts=128, batch_invariant=invariant)
    assert find("run_experts", case) is row


@pytest.mark.parametrize(
    ("weights", "pairs", "invariant", "row"),
    [
        ("rounding", 8, False, FEW_PACKED_EXPERTS),
        ("packed", 32, False, FEW_PACKED_EXPERTS),
        ("rounding", 40, False, SPLIT_EXPERTS),
        ("rounding", 128 * 16, False, FEW_ROUNDED_EXPERTS),
        ("rounding", 128 * 32, False, ROUNDED_EXPERTS),
        ("rounding", 128 * 64, False, HOPPER_ROUNDED_EXPERTS),
        ("packed", 128 * 512, False, EXPERTS),
        ("rounding", 8, True, EXPERTS),
        ("rounding", 128 * 512, True, EXPERTS),
    ],
)
def test_packed_experts_have_kernels_by_their_load(weights, pairs, invariant, row):
    case = Case("cuda", 9, num_pairs=pairs, num_experts=128, weights=weights, batch_invariant=invariant)
    assert find("run_experts", case) is row


@pytest.mark.parametrize("case", [Case(head_dim=320), Case(head_dim=20), Case(block_size=8), Case(dtype=torch.int8)])
def test_a_shape_that_nothing_serves_is_named(case):
    with pytest.raises(LookupError, match="no implementation of prefill_attention serves"):
        find("prefill_attention", case)


@pytest.mark.parametrize(
    ("op", "num_tokens", "path"),
    [
        ("project", 16, SMALL_PROJECT.path),
        ("project", 17, "torch:addmm"),
        ("gate", 16, SMALL_GATE.path),
        ("gate", 17, "torch:addmm"),
        ("add", 64, SMALL_ADD.path),
        ("add", 65, "torch:addmm"),
        ("add", 1024, SUMMING_ADD.path),
        ("multiply", 1, "torch:addmm"),
    ],
)
def test_linears_are_chosen_by_the_number_of_tokens(op, num_tokens, path):
    assert find(op, Case(num_tokens=num_tokens)).path == path
    assert find(op, Case(num_tokens=num_tokens, unfused=True)).path == "torch:addmm"
    assert find(op, Case(num_tokens=num_tokens, batch_invariant=True)).path.endswith(":matmul")


def test_a_cpu_has_every_operation():
    for op in {row.op for row in TABLE}:
        assert find(op, Case("cpu")).device == "cpu"
