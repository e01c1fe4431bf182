"""Products with packed weights, in every format of checkpoints, against what the packed weights mean."""

from __future__ import annotations

import pytest
import torch
from support.engine.packed.linears import PackedLinear, packed_linear
from support.kernels.harness import BOUNDS, cases, poisoned, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.quantized.choice import MANY, TWO_PARTS, fits_scaled_mm
from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.linear.quantized.fp8 import fp8_linear, has_scaled_mm, scaled_mm_linear
from baton.kernels.linear.quantized.fp8_few import Fp8Tiling, few_fp8_linear
from baton.kernels.linear.quantized.linear import quantized_linear
from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.packed.rounding import rounded
from baton.kernels.packed.weight import PackedWeight, rounds

BLOCKS = {"weight_block_size": [128, 128]}
# A format of each way that the kernels read: numbers, scales, zeros, and the order of groups.
NAMES = [
    "compressed-fp8-channel",
    "fp8-blocks",
    "fp8-blocks-across-parts",
    "compressed-int8",
    "compressed-int8-zeros",
    "compressed-w4a16",
    "compressed-w4a16-order",
    "compressed-w8a16-channel",
    "gptq-zeros",
    "gptq-order",
    "gptq-8-rows-v2",
    "gptq-2",
    "awq",
    "compressed-mxfp4",
    "compressed-nvfp4",
    "modelopt-nvfp4",
    "bitsandbytes-nf4",
    "bitsandbytes-fp4",
]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SMALL = [
    *((name, FP32, (1, 3)) for name in NAMES),
    ("awq", FP16, (70,)),
    ("gptq-order", FP16, (2, 17)),
    ("compressed-fp8-channel", FP16, (1, 3, 70)),
]
TOKENS = (1, 2, 16, TWO_PARTS, 64, 65, 200, MANY)
GRID = [*((name, BF16, TOKENS) for name in NAMES), ("gptq-zeros", FP16, TOKENS), ("awq", FP32, (1, 3, 70))]
ROUNDED = 5e-2  # of tokens in e4m3, whose numbers have 4 digits


def weight_of(linear: PackedLinear) -> PackedWeight:
    return linear.method.packed_weight(linear.params)  # type: ignore[attr-defined,no-any-return]


def exact(linear: PackedLinear, x: Tensor) -> Tensor:
    return x.double() @ linear.weight.double().t() + linear.bias.double()


@pytest.mark.parametrize(("name", "dtype", "tokens", "device"), [
    pytest.param(*param.values[0], param.values[1], id=param.id, marks=param.marks) for param in cases(SMALL, GRID)
])  # fmt: skip
def test_products_equal_those_with_the_weights_that_are_meant(
    name: str, dtype: torch.dtype, tokens: tuple[int, ...], device: str
) -> None:
    # Neither size is a multiple of the kernels' tiles.
    unit = 32 if "bitsandbytes" not in name else 64
    rows, columns = (48, 5 * unit) if device == "cpu" else (1072, 65 * unit)
    linear = packed_linear(name, (rows,), columns, dtype, device)
    weight, workspace = weight_of(linear), Workspace(torch.device(device), 1 << 21)
    workspace.partial.fill_(float("nan"))
    for num_tokens in tokens:
        x = torch.randn(num_tokens, columns, device=device).to(dtype)
        out = poisoned(num_tokens, rows, dtype=dtype, device=device)
        assert quantized_linear(x, weight, workspace, out) is out
        bound = ROUNDED if num_tokens > TWO_PARTS and rounds(weight) else BOUNDS[dtype]
        assert relative_error(out, exact(linear, x)) <= bound, num_tokens
    assert not workspace.arrived.any()
    whole = dequantize(weight, columns, dtype)
    meant = linear.weight if weight.order is None else linear.weight[:, weight.order[0].long()]
    assert relative_error(whole, meant) <= BOUNDS[dtype]


@pytest.mark.parametrize(
    ("name", "device"),
    cases(["compressed-fp8-channel", "fp8-blocks-across-parts"], ["fp8-tensor", "fp8-blocks-across-parts"]),
)
def test_many_tokens_are_rounded_to_8_bits_with_scales_of_their_own(name: str, device: str) -> None:
    dtype, rows, columns, num_tokens = (FP16, 48, 160, 5) if device == "cpu" else (BF16, 1152, 2560, 304)
    linear = packed_linear(name, (rows,), columns, dtype, device)
    weight = weight_of(linear)
    assert rounds(weight)
    # Tokens of very different sizes keep their digits.
    x = torch.randn(num_tokens, columns, device=device) * torch.logspace(-3, 2, num_tokens, device=device)[:, None]
    x = x.to(dtype)
    group = weight.group if weight.scale is not None else 0
    narrow, scale = rounded(x, group)
    spread = scale.t().repeat_interleave(group or columns, 1)[:, :columns]
    used = narrow.float() * spread
    assert relative_error(used, x) <= ROUNDED
    out = poisoned(num_tokens, rows, dtype=dtype, device=device)
    fp8_linear(x, weight, out)
    assert relative_error(out, exact(linear, used)) <= BOUNDS[dtype]
    if device == "cuda" and has_scaled_mm(x) and fits_scaled_mm(weight, columns):
        for count in (num_tokens, num_tokens - 5):  # blocks are multiplied in rows of 16
            for into in (out[:count], None):
                found = scaled_mm_linear(x[:count], weight, into)
                assert found.shape == (count, rows)
                assert relative_error(found, exact(linear, used[:count])) <= BOUNDS[dtype]


@pytest.mark.parametrize(
    ("name", "device"),
    cases(
        ["compressed-fp8-channel", "gptq-zeros", "compressed-mxfp4", "awq", "gptq-order"],
        [
            "fp8-tensor",
            "fp8-blocks-across-parts",
            "gptq-zeros",
            "gptq-order",
            "compressed-w4a16",
            "compressed-mxfp4",
            "awq",
            "bitsandbytes-nf4",
        ],
    ),
)
def test_the_norm_the_gate_and_the_residual_of_one_token_are_fused(name: str, device: str) -> None:
    dtype, rows, columns = (FP32, 48, 160) if device == "cpu" else (BF16, 1088, 2112)
    linear = packed_linear(name, (rows,), columns, dtype, device)
    x, norm, residual = (torch.randn(1, size, device=device).to(dtype) for size in (columns, columns, rows))
    normed = functional.rms_norm(x.double(), (columns,), norm[0].double(), 1e-5)
    product = normed @ linear.weight.double().t() + linear.bias.double()
    gates, ups = product.chunk(2, dim=1)
    out = poisoned(1, rows // 2, dtype=dtype, device=device)
    weight = weight_of(linear)
    vector_linear(x, weight, out, norm=norm[0], eps=1e-5, gated=True)
    assert relative_error(out, functional.silu(gates) * ups) <= BOUNDS[dtype]
    expected = residual.double() + exact(linear, x)
    assert relative_error(vector_linear(x, weight, residual, residual=residual), expected) <= BOUNDS[dtype]


@pytest.mark.interpreted
@pytest.mark.parametrize("group", [0, 128])
def test_rows_of_no_token_change_none_of_a_token(group: int) -> None:
    x = torch.randn(7, 320).bfloat16()
    narrow, scale = rounded(x, group)
    more, more_scale = rounded(x, group, row_unit=16)
    assert more.shape == (16, 320)
    assert torch.equal(more[:7].view(torch.uint8), narrow.view(torch.uint8))
    assert torch.equal(more_scale[:, :7], scale)


@pytest.mark.interpreted
@pytest.mark.parametrize("group", [0, 128])
def test_two_parts_in_8_bits_lose_nothing_of_bfloat16(group: int) -> None:
    x = (torch.randn(7, 320) * torch.logspace(-4, 4, 7)[:, None]).bfloat16()
    narrow, scale = rounded(x, group, 2)
    spread = scale.t().repeat_interleave(group or 320, 1)[:, :320]
    lost = (narrow.float() * spread).unflatten(0, (7, 2)).sum(1) - x.float()
    largest = 448 * spread[::2]
    assert not lost[x.abs() >= largest * 2**-13].any()
    assert bool((lost.abs() <= largest * 2**-17).all())


@pytest.mark.parametrize(
    ("name", "device"),
    cases(["compressed-fp8-channel", "fp8-blocks-across-parts"], ["fp8-tensor", "fp8-blocks-across-parts"]),
)
def test_few_tokens_of_two_parts_have_products_as_without_rounding(name: str, device: str) -> None:
    dtype, rows, columns, tokens = (FP16, 48, 288, (2, 9)) if device == "cpu" else (BF16, 1072, 2080, (1, 16, 64))
    linear = packed_linear(name, (rows,), columns, dtype, device)
    workspace = Workspace(torch.device(device), 1 << 21)
    workspace.partial.fill_(float("nan"))
    for num_tokens in tokens:
        x = torch.randn(num_tokens, columns, device=device) * torch.logspace(-3, 1, num_tokens, device=device)[:, None]
        x = x.to(dtype)
        for tiling in (Fp8Tiling(16, 64, 128, 2, 4, 3), None):
            out = poisoned(num_tokens, rows, dtype=dtype, device=device)
            few_fp8_linear(x, weight_of(linear), out, workspace, tiling=tiling)
            assert relative_error(out, exact(linear, x)) <= BOUNDS[dtype] / 2, (num_tokens, tiling)
    assert not workspace.arrived.any()


@pytest.mark.parametrize(("name", "device"), cases(["gptq-zeros"], ["fp8-tensor", "fp8-blocks", "gptq-zeros", "awq"]))
def test_a_batch_invariant_product_of_a_token_does_not_depend_on_others(name: str, device: str) -> None:
    dtype, rows, columns = (FP32, 48, 160) if device == "cpu" else (BF16, 1072, 2080)
    linear = packed_linear(name, (rows,), columns, dtype, device)
    weight = weight_of(linear)
    x = torch.randn(67 if device == "cpu" else 900, columns, device=device).to(dtype)
    whole = quantized_linear(x, weight, None, batch_invariant=True)
    assert relative_error(whole, exact(linear, x)) <= BOUNDS[dtype]
    for first, last in ((0, 1), (1, 4), (60, 67)):
        assert torch.equal(quantized_linear(x[first:last], weight, None, batch_invariant=True), whole[first:last])
