"""Ops of packed weights on a GPU, in Triton's interpreter: what is fused for one token equals separate launches."""

from __future__ import annotations

import pytest
import torch
from support.engine.packed.linears import PackedLinear, packed_linear
from support.kernels.harness import BOUNDS, relative_error
from torch import Tensor
from torch.nn import functional

from baton.kernels import reference
from baton.kernels.activation.silu_mul import silu_mul
from baton.kernels.norm.rms_norm import rms_norm
from baton.kernels.routing import Gate
from baton.worker.quantization.experts import DOWN, GATE_UP
from baton.worker.quantization.neighbours import Norm, Stream
from baton.worker.quantization.quantized.cuda import CudaPackedOps
from baton.worker.quantization.quantized.cuda_experts import CudaPackedExperts

pytestmark = pytest.mark.interpreted

CPU, FP32, EPS = torch.device("cpu"), torch.float32, 1e-5
COLUMNS, ROWS, EXPERTS, SIZE = 64, 96, 16, 32


class Kernels:
    """Kernels that must not be launched, because the ops fuse what they compute."""


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def normed(x: Tensor, norm: Norm) -> Tensor:
    return functional.rms_norm(x.double(), (x.shape[1],), norm.weight.double(), norm.eps)


def test_one_token_has_its_norm_gate_and_residual_in_the_launches_of_its_linears() -> None:
    linear = packed_linear("compressed-fp8-channel", (ROWS,), COLUMNS, FP32, "cpu")
    ops = CudaPackedOps(Kernels(), linear.method, CPU)  # type: ignore[arg-type]
    norm, x = Norm(torch.randn(COLUMNS), EPS), torch.randn(1, COLUMNS)
    expected = normed(x, norm) @ linear.weight.double().t() + linear.bias.double()
    stream = Stream(x, fuse_norms=True)
    assert relative_error(ops.project(linear.params, stream, norm), expected) <= BOUNDS[FP32]
    gates, ups = expected.chunk(2, dim=1)
    assert relative_error(ops.gate(linear.params, stream, norm), functional.silu(gates) * ups) <= BOUNDS[FP32]
    into = Stream(torch.randn(1, ROWS))
    summed = into.residual.double() + x.double() @ linear.weight.double().t() + linear.bias.double()
    ops.add(linear.params, x, into)
    assert into.update is None
    assert relative_error(into.residual, summed) <= BOUNDS[FP32]


def test_parts_in_orders_of_their_own_have_the_norm_of_one_token_in_their_launches() -> None:
    linear = packed_linear("gptq-order", (64, 32, 32), COLUMNS, FP32, "cpu")
    ops = linear.method.on_cuda(Kernels(), CPU, batch_invariant=False)  # type: ignore[arg-type]
    norm, x = Norm(torch.randn(COLUMNS), EPS), torch.randn(1, COLUMNS)
    expected = normed(x, norm) @ linear.weight.double().t() + linear.bias.double()
    found = ops.project(linear.params, Stream(x, fuse_norms=True), norm)
    assert relative_error(found, expected) <= BOUNDS[FP32]
    many = torch.randn(5, COLUMNS)
    expected = many.double() @ linear.weight.double().t() + linear.bias.double()
    assert relative_error(ops.project(linear.params, Stream(many, fuse_norms=True), None), expected) <= BOUNDS[FP32]


@pytest.mark.parametrize("name", ["compressed-fp8-channel", "fp8-blocks-across-parts"])
@pytest.mark.parametrize("num_tokens", [40, 130])
def test_tokens_that_are_rounded_have_their_norm_and_its_rounding_in_one_launch(name: str, num_tokens: int) -> None:
    dtype = torch.float16
    linear = packed_linear(name, (ROWS,), 256, dtype, "cpu")
    ops = CudaPackedOps(Kernels(), linear.method, CPU)  # type: ignore[arg-type]
    norm = Norm(torch.rand(256).to(dtype), EPS)
    x, update = (torch.randn(num_tokens, 256).to(dtype) for _ in range(2))
    for stream, summed in ((Stream(x.clone()), x), (Stream(x.clone()), x + update)):
        if summed is not x:
            stream.add(update)
        apart = ops.multiply(linear.params, rms_norm(summed, norm.weight, EPS))
        assert torch.equal(ops.project(linear.params, stream, norm), apart)
        assert torch.equal(stream.residual, summed)
        assert stream.update is None


@pytest.mark.parametrize("name", ["compressed-fp8-channel", "fp8-blocks-across-parts"])
@pytest.mark.parametrize("num_tokens", [40, 130])
def test_what_is_gated_and_rounded_is_so_in_one_launch(name: str, num_tokens: int) -> None:
    linear = packed_linear(name, (ROWS,), 256, torch.float16, "cpu")
    ops = CudaPackedOps(Kernels(), linear.method, CPU)  # type: ignore[arg-type]
    gate_up, stream = torch.randn(num_tokens, 512).half(), Stream(torch.randn(num_tokens, ROWS).half())
    assert ops.fuses_gate(linear.params, stream.residual)
    assert not ops.fuses_gate(linear.params, stream.residual[:32])
    apart = ops.multiply(linear.params, silu_mul(gate_up))
    ops.add_gated(linear.params, gate_up, stream)
    assert stream.update is not None
    assert torch.equal(stream.update, apart)


def test_few_experts_have_their_norm_and_residual_in_their_launches() -> None:
    each = {
        linear: [packed_linear("compressed-mxfp4", (rows,), columns, FP32, "cpu") for _ in range(EXPERTS)]
        for linear, rows, columns in ((GATE_UP, 2 * SIZE, COLUMNS), (DOWN, COLUMNS, SIZE))
    }
    params = {
        f"{linear}.{name}": torch.stack([one.params[name] for one in ones])
        for linear, ones in each.items()
        for name in ones[0].params
    }
    methods = {linear: ones[0].method for linear, ones in each.items()}
    ops = CudaPackedExperts(Kernels(), methods, CPU, batch_invariant=False)  # type: ignore[arg-type]
    norm, x = Norm(torch.randn(COLUMNS), EPS), torch.randn(1, COLUMNS)
    weights, ids = torch.rand(1, 2), torch.tensor([[3, 11]], dtype=torch.int32)
    expected = x.double() + _sum(each, normed(x, norm), weights, ids)
    assert ops.fuses_norm(params, 2)
    assert not ops.fuses_norm(params, 3 * EXPERTS)
    stream = Stream(x, fuse_norms=True)
    ops.add_normed(params, stream, norm, weights, ids, Gate())
    assert relative_error(stream.residual, expected) <= BOUNDS[FP32]


def _sum(each: dict[str, list[PackedLinear]], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    stacks = [torch.stack([one.weight for one in each[linear]]).double() for linear in (GATE_UP, DOWN)]
    biases = [torch.stack([one.bias for one in each[linear]]).double() for linear in (GATE_UP, DOWN)]
    return reference.run_experts(x, weights.double(), ids.long(), *stacks, Gate(), *biases)
