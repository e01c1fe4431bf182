"""Products of one token with weights of 4 bits, against what the stored bits mean."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.kernels.compile_hopper import compiled_for_hopper
from support.kernels.harness import poisoned, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.quantized.vector import vector_linear
from baton.kernels.moe.few_packed import _FOUR_BIT_DOWN, _FOUR_BIT_GATE_UP, run_few_packed
from baton.kernels.packed.four_bits import (
    FourBitTiling,
    choose_four_bit_tiling,
    multiply_four_bits,
    reads_four_bits,
)
from baton.kernels.packed.weight import PackedWeight
from baton.kernels.reference.moe.experts import run_experts
from baton.kernels.routing import Gate

BF16 = torch.bfloat16
BOUND = 5e-3  # of bfloat16 results and normed inputs
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CARD = pytest.mark.gpu
# From registers and from shared memory; with fewer steps at once than a row has, and with more.
CUTS = [
    FourBitTiling(4, 2, 2),
    FourBitTiling(2, 1, 4, shared=True),
    FourBitTiling(4, 2, 4, shared=True, ahead=2),
    FourBitTiling(8, 1, 6, shared=True, ahead=3),
    FourBitTiling(16, 1, 3, shared=True),
]
# Rows and columns: of Llama 3.1 8B, and such that neither fills the last program or part.
SIZES = [(6144, 4096), (4096, 4096), (4096, 14336), (1072, 1152), (48, 128)]


class Weight(NamedTuple):
    """A packed weight, and what it means."""

    packed: PackedWeight
    meant: Tensor  # [n, k] fp64; of experts [num_experts, n, k]
    bias: Tensor  # [n] fp64; of experts [num_experts, n]


def integers(n: int, k: int, device: str, *, zeros: bool = True, group: int = 128) -> Weight:
    """Returns words of 8 integers along columns, with a scale and perhaps a zero, stored less 1, for each group."""
    numbers = torch.randint(16, (n, k), device=device)
    zero = torch.randint(1, 17, (n, k // group), device=device) if zeros else torch.full((n, k // group), 8).to(device)
    scale = torch.rand(n, k // group, device=device) * 1e-2 + 1e-3
    bias = torch.randn(n, device=device).to(BF16)
    own_zero, own_scale = (one.repeat_interleave(group, 1).double() for one in (zero % 16, scale))
    packed_zero = words_of((zero.t() - 1).contiguous() % 16).t().contiguous() if zeros else None
    packed = PackedWeight(
        "words", words_of(numbers), n, 4, scale, group=group, zero=packed_zero, zero_plus=1, bias=bias
    )
    return Weight(packed, (numbers.double() - own_zero) * own_scale, bias.double())


def floats(n: int, k: int, device: str, num_experts: int = 1, row_sizes: int = 40) -> Weight:
    """Returns e2m1 with exponents of 2 for groups of 32 columns, and rows whose sizes differ by up to so many."""
    codes = torch.randint(16, (num_experts, n, k), device=device)
    exponents = torch.randint(-row_sizes, row_sizes + 1, (num_experts, n, 1), device=device)
    exponents = exponents + torch.randint(-8, -4, (num_experts, n, k // 32), device=device)
    values = torch.tensor([*E2M1, *(-one for one in E2M1)], dtype=torch.float64, device=device)[codes]
    stored = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    scale, bias = (exponents + 127).to(torch.uint8), torch.randn(num_experts, n, device=device).to(BF16)
    packed = PackedWeight("e2m1", stored[0], n, 4, scale[0], group=32, num_experts=num_experts, bias=bias[0])
    meant = values * 2.0 ** exponents.double().repeat_interleave(32, 2)
    return Weight(packed, meant, bias.double()) if num_experts > 1 else Weight(packed, meant[0], bias[0].double())


def words_of(numbers: Tensor) -> Tensor:
    """Returns int32 of 8 numbers along columns, the first in the lowest bits."""
    shifts = torch.arange(8, device=numbers.device) * 4
    return (numbers.view(len(numbers), -1, 8) << shifts).sum(2).to(torch.uint32).view(torch.int32)


@CARD
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("kind", ["zeros", "symmetric", "e2m1"])
def test_products_equal_those_with_what_is_stored(kind: str, n: int, k: int) -> None:
    weight = floats(n, k, "cuda") if kind == "e2m1" else integers(n, k, "cuda", zeros=kind == "zeros")
    x = torch.randn(1, k, device="cuda").to(BF16)
    assert reads_four_bits(weight.packed, x, k)
    product = x.double() @ weight.meant.t() + weight.bias
    # Each row by itself, because rows of floats have sizes of their own.
    allowed = 1e-2 * (x.double().abs() @ weight.meant.abs().t() / k**0.5 + product.abs() + weight.bias.abs())
    out = vector_linear(x, weight.packed, poisoned(1, n, dtype=BF16, device="cuda"))
    assert bool(((out.double() - product).abs() <= allowed).all())
    residual = torch.randn(1, n, device="cuda").to(BF16)
    expected = product + residual.double()
    assert relative_error(vector_linear(x, weight.packed, residual, residual=residual), expected) <= BOUND


@CARD
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1072, 1152), (48, 128)])
@pytest.mark.parametrize("kind", ["zeros", "e2m1"])
@pytest.mark.parametrize("tiling", CUTS)
def test_each_way_to_cut_and_to_load_gives_the_same_products(tiling: FourBitTiling, kind: str, n: int, k: int) -> None:
    weight = floats(n, k, "cuda", row_sizes=0) if kind == "e2m1" else integers(n, k, "cuda")
    x = torch.randn(1, k, device="cuda").to(BF16)
    out = multiply_four_bits(poisoned(1, n, dtype=BF16, device="cuda"), x, weight.packed, tiling)
    assert relative_error(out, x.double() @ weight.meant.t() + weight.bias) <= BOUND


@CARD
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1072, 1152)])
def test_columns_in_another_order_are_multiplied_with_their_own_numbers(n: int, k: int) -> None:
    weight, order = integers(n, k, "cuda"), torch.randperm(k, device="cuda")
    packed = weight.packed._replace(order=order.int().view(1, k))
    x, norm = torch.randn(1, k, device="cuda").to(BF16), torch.rand(k, device="cuda").to(BF16)
    assert reads_four_bits(packed, x, k)
    normed = functional.rms_norm(x.double(), (k,), norm.double(), 1e-5)
    exact = normed[:, order] @ weight.meant.t() + weight.bias
    out = vector_linear(x, packed, poisoned(1, n, dtype=BF16, device="cuda"), norm=norm, eps=1e-5)
    assert relative_error(out, exact) <= BOUND


@CARD
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (536, 1152)])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_norm_and_the_gate_are_fused(n: int, k: int, zeros: bool) -> None:
    weight = integers(2 * n, k, "cuda", zeros=zeros)
    x, norm = torch.randn(1, k, device="cuda").to(BF16), torch.randn(k, device="cuda").to(BF16)
    normed = functional.rms_norm(x.double(), (k,), norm.double(), 1e-5)
    gates, ups = (normed @ weight.meant.t() + weight.bias).chunk(2, dim=1)
    out = poisoned(1, n, dtype=BF16, device="cuda")
    vector_linear(x, weight.packed, out, norm=norm, eps=1e-5, gated=True)
    assert relative_error(out, functional.silu(gates) * ups) <= BOUND


@CARD
@pytest.mark.parametrize(
    ("hidden", "size", "top_k", "num_tokens"), [(2880, 2880, 4, 1), (320, 96, 2, 3), (96, 320, 3, 1)]
)
def test_sums_of_experts_are_those_of_what_is_stored(hidden: int, size: int, top_k: int, num_tokens: int) -> None:
    up, down = floats(2 * size, hidden, "cuda", 8, 0), floats(hidden, size, "cuda", 8, 0)
    x, norm = torch.randn(num_tokens, hidden, device="cuda").to(BF16), torch.rand(hidden, device="cuda").to(BF16)
    shares = torch.rand(num_tokens, top_k, device="cuda")
    ids = torch.rand(num_tokens, 8, device="cuda").topk(top_k, dim=1).indices
    gate = Gate(7.0)
    normed = functional.rms_norm(x.double(), (hidden,), norm.double(), 1e-5)
    exact = run_experts(normed, shares.double(), ids, up.meant, down.meant, gate, up.bias, down.bias) + x.double()
    found = run_few_packed(x, shares, ids, up.packed, down.packed, gate, norm=norm, eps=1e-5, residual=x)
    assert relative_error(found, exact) <= BOUND


def test_weights_that_the_kernel_does_not_read_are_refused() -> None:
    assert not reads_four_bits(integers(16, 128, "cpu").packed, torch.zeros(1, 128).to(BF16), 128)


@pytest.mark.parametrize(("n", "k", "is_gated"), [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True)])
def test_products_of_integers_spill_nothing(n: int, k: int, is_gated: bool) -> None:
    rows = 2 * n if is_gated else n
    x, out = torch.zeros(1, k, dtype=BF16), torch.zeros(1, n, dtype=BF16)
    scale, zero = torch.zeros(rows, k // 128), torch.zeros(rows // 8, k // 128, dtype=torch.int32)
    words = torch.zeros(rows, k // 8, dtype=torch.int32)
    weight = PackedWeight("words", words, rows, 4, scale, group=128, zero=zero)
    with compiled_for_hopper() as found:
        tiling = choose_four_bit_tiling(n, k, is_gated=is_gated)
        multiply_four_bits(out, x, weight, tiling, norm=x[0], gate=Gate() if is_gated else None)
        order = torch.zeros(1, k, dtype=torch.int32)
        multiply_four_bits(out, x, weight._replace(order=order), tiling, gate=Gate() if is_gated else None)
    assert [one.spilled for one in found] == [0, 0]


def test_products_of_experts_spill_nothing() -> None:
    up = _expert(512, 256)
    down = _expert(256, 256)
    x, ids = torch.zeros(1, 256, dtype=BF16), torch.zeros(1, 4, dtype=torch.int32)
    gated = torch.zeros(4, 256, dtype=BF16)
    with compiled_for_hopper() as found:
        multiply_four_bits(gated, x, up, _FOUR_BIT_GATE_UP, norm=x[0], gate=Gate(7.0), ids=ids)
        multiply_four_bits(x, gated, down, _FOUR_BIT_DOWN, residual=x, ids=ids, shares=torch.zeros(1, 4))
    assert [one.spilled for one in found] == [0, 0]


def _expert(n: int, k: int) -> PackedWeight:
    stored, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // 32, dtype=torch.uint8)
    return PackedWeight("e2m1", stored, n, 4, scale, group=32, num_experts=8, bias=torch.zeros(n, dtype=BF16))
