"""Experts with packed weights, in every way that kernels read them, against what the packed weights mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from support.engine.packed.linears import PackedLinear, packed_linear
from support.kernels.harness import BOUNDS, cases, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels import reference
from baton.kernels.moe.experts import run_experts, run_rounded_experts
from baton.kernels.moe.experts_fp8 import run_few_rounded_experts, run_split_experts
from baton.kernels.moe.experts_hopper_fp8 import run_rounded_experts_hopper
from baton.kernels.moe.few_packed import run_few_packed
from baton.kernels.packed.rounding import rounded
from baton.kernels.packed.weight import PackedWeight, rounds
from baton.kernels.reference.moe.experts import gated_by
from baton.kernels.routing import Gate

ROUNDED = 1e-1  # of activations in e4m3, whose numbers have 4 digits, twice
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FEW = 4  # tokens
HOPPER = 9  # major version of the compute capability
CLAMPED = Gate(0.5, 1.3)


class Stack(NamedTuple):
    """The same linear of all experts."""

    packed: PackedWeight
    weight: Tensor  # [num_experts, rows, columns]
    bias: Tensor


def stacked(each: Sequence[PackedLinear]) -> Stack:
    params = {name: torch.stack([one.params[name] for one in each]) for name in each[0].params}
    first = each[0].method.packed_weight({name: stack[0] for name, stack in params.items()})  # type: ignore[attr-defined]
    weight, bias = (torch.stack([getattr(one, name) for one in each]) for name in ("weight", "bias"))
    return Stack(first._replace(num_experts=len(each)), weight, bias)


class Experts(NamedTuple):
    format: str
    dtype: torch.dtype
    tokens: tuple[int, ...]
    num_experts: int = 4
    top_k: int = 2
    hidden: int = 96
    size: int = 64
    gate: Gate = Gate()

    def __str__(self) -> str:
        return f"{self.format}-{self.hidden}-{self.size}-{self.dtype}"


class Inputs:
    """Weights of a case, and tokens."""

    def __init__(self, case: Experts, device: str) -> None:
        self.case, self.device = case, device
        # Parts whose columns are in orders of their own join as gates and ups.
        gates = (case.size, case.size) if case.format.endswith("-order") else (2 * case.size,)
        self.gate_up = self._stack(gates, case.hidden)
        self.down = self._stack((case.hidden,), case.size)

    def _stack(self, rows: tuple[int, ...], columns: int) -> Stack:
        case = self.case
        return stacked(
            [
                packed_linear(case.format, rows, columns, case.dtype, self.device, of_experts=True)
                for _ in range(case.num_experts)
            ]
        )

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        case = self.case
        scores = torch.rand(count, case.num_experts, device=self.device)
        x = torch.randn(count, case.hidden, device=self.device).to(case.dtype)
        return x, torch.rand(count, case.top_k, device=self.device), scores.topk(case.top_k, dim=-1).indices

    def exact(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        up, down = self.gate_up, self.down
        wide = [one.double() for one in (up.weight, down.weight, up.bias, down.bias)]
        return reference.run_experts(x.double(), weights.double(), ids, *wide[:2], self.case.gate, *wide[2:])


SMALL = [
    *(Experts(name, FP32, (1, 9)) for name in ("gptq-zeros", "compressed-w4a16-order")),
    Experts("compressed-fp8-channel", FP32, (1,)),
    Experts("compressed-fp8-channel", FP32, (5,), 2, 1, hidden=720),  # no multiple of the kernels' step
    Experts("compressed-mxfp4", FP32, (1,), gate=CLAMPED),
    Experts("awq", FP32, (3,)),
    Experts("fp8-blocks", FP16, (1, 70)),
    Experts("modelopt-nvfp4", FP32, (1,)),
    Experts("compressed-int8-zeros", FP32, (1,)),
    Experts("bitsandbytes-nf4", FP32, (1, 5), hidden=128),
    Experts("gptq-order", FP32, (2, 9), hidden=96, size=96),
]
TOKENS = (1, 4, 33, 300, 1000)
GRID = [
    *(
        Experts(name, BF16, TOKENS, 8, 3, 512, 384)
        for name in ("gptq-zeros", "compressed-fp8-channel", "fp8-blocks-across-parts", "compressed-w4a16-order", "awq")
    ),
    *(
        Experts(name, BF16, TOKENS, 8, 3, 512, 384)
        for name in ("gptq-order", "gptq-2", "bitsandbytes-nf4", "bitsandbytes-fp4")
    ),
    Experts("compressed-mxfp4", BF16, TOKENS, 8, 3, 576, 576, Gate(7.0)),
    Experts("modelopt-nvfp4", BF16, TOKENS, 8, 3, 512, 384),
    Experts("compressed-int8-zeros", FP16, TOKENS, 8, 3, 512, 384),
    Experts("awq", FP32, (1, 40), 8, 3, 512, 384),
]


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_sums_equal_those_with_the_weights_that_are_meant(case: Experts, device: str) -> None:
    given = Inputs(case, device)
    for count in case.tokens:
        x, weights, ids = given.tokens(count)
        found = run_experts(x, weights, ids, given.gate_up.packed, given.down.packed, case.gate)
        exact = given.exact(x, weights, ids)
        assert relative_error(found, exact) <= BOUNDS[case.dtype], count
        if count <= FEW:
            few = run_few_packed(x, weights, ids, given.gate_up.packed, given.down.packed, case.gate)
            assert relative_error(few, exact) <= BOUNDS[case.dtype], count


@pytest.mark.parametrize(
    ("case", "device"),
    cases(
        [Experts("compressed-mxfp4", FP32, (2,), gate=CLAMPED)],
        [Experts(name, BF16, (1, 4), 8, 3, 512, 384) for name in ("compressed-mxfp4", "fp8-blocks-across-parts")],
    ),
)
def test_the_norm_before_and_the_sum_after_few_experts_are_fused(case: Experts, device: str) -> None:
    given = Inputs(case, device)
    norm = torch.randn(case.hidden, device=device).to(case.dtype)
    for count in case.tokens:
        x, weights, ids = given.tokens(count)
        normed = functional.rms_norm(x.double(), (case.hidden,), norm.double(), 1e-5)
        expected = x.double() + given.exact(normed, weights, ids)
        packed = given.gate_up.packed, given.down.packed, case.gate
        assert run_few_packed(x, weights, ids, *packed, norm=norm, eps=1e-5, residual=x) is x
        assert relative_error(x, expected) <= BOUNDS[case.dtype]


FEW_COLUMNS = Experts("compressed-fp8-channel", FP16, (5,), 2, 2, 160, 144, CLAMPED)
BLOCKS = "fp8-blocks-across-parts"


@pytest.mark.parametrize(
    ("case", "device"),
    cases(
        [FEW_COLUMNS, Experts(BLOCKS, FP16, (6,), 2, 1, 160, 128)],
        [
            Experts(BLOCKS, BF16, (200, 700), 8, 3, 512, 384),
            Experts("compressed-fp8-channel", BF16, (200, 900), 8, 3, 576, 576, Gate(7.0)),
            Experts("fp8-tensor", FP16, (64, 500), 8, 3, 512, 384),
        ],
    ),
)
def test_activations_are_rounded_with_scales_of_their_own(case: Experts, device: str) -> None:
    given = Inputs(case, device)
    up, down = given.gate_up, given.down
    assert rounds(up.packed)
    assert rounds(down.packed)
    packed = up.packed, down.packed, case.gate
    runs = [run_few_rounded_experts, run_rounded_experts]
    if device == "cuda" and torch.cuda.get_device_capability()[0] == HOPPER:
        runs.append(run_rounded_experts_hopper)
    for count in case.tokens:
        x, weights, ids = given.tokens(count)
        exact = given.exact(x, weights, ids)
        assert relative_error(run_split_experts(x, weights, ids, *packed), exact) <= BOUNDS[case.dtype]
        for run in runs:
            assert relative_error(run(x, weights, ids, *packed), exact) <= ROUNDED
        # Tokens of very different sizes keep their digits.
        x *= torch.logspace(-2, 1, count, device=device)[:, None].to(x.dtype)
        expected = torch.zeros_like(x, dtype=torch.float64)
        for choice in range(case.top_k):
            mine = ids[:, choice]
            products = torch.einsum("tk,tnk->tn", used(x), up.weight[mine].double()) + up.bias[mine]
            gated = used(gated_by(products, case.gate).float())
            downs = torch.einsum("tk,tnk->tn", gated, down.weight[mine].double()) + down.bias[mine]
            expected += weights[:, choice, None] * downs
        for run in runs:
            assert relative_error(run(x, weights, ids, *packed), expected) <= BOUNDS[case.dtype]


def used(x: Tensor) -> Tensor:
    """Returns x with the digits of e4m3."""
    narrow, scale = rounded(x, 128)
    return (narrow.float() * scale.t().repeat_interleave(128, 1)[:, : x.shape[1]]).double()


@pytest.mark.parametrize(
    ("case", "device"),
    cases(
        [Experts("fp8-blocks", FP32, (40,))],
        [Experts(name, BF16, (900,), 8, 3, 512, 384) for name in ("gptq-zeros", BLOCKS, "compressed-mxfp4")],
    ),
)
def test_a_token_is_bit_identical_in_any_company(case: Experts, device: str) -> None:
    given = Inputs(case, device)
    x, weights, ids = given.tokens(case.tokens[0])
    packed = (given.gate_up.packed, given.down.packed, case.gate)
    whole = run_experts(x, weights, ids, *packed)
    for first, last in ((0, 1), (1, 4), (7, 40)):
        some = slice(first, last)
        assert torch.equal(run_experts(x[some], weights[some], ids[some], *packed), whole[some])
