"""Linears of a CPU that oneDNN multiplies, beside products in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.reference.linear.packed import beats_blas, is_large
from baton.worker.layers.cpu.device import CpuKernels
from baton.worker.quantization.base import LinearOps, Params
from baton.worker.quantization.neighbours import Norm, Stream
from baton.worker.quantization.registry import UNQUANTIZED

_IN, _OUT = 512, 512


class _Called(TorchDispatchMode):
    """Notes the names of PyTorch's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


pytestmark = pytest.mark.skipif(not beats_blas(), reason="this PyTorch multiplies by its BLAS alone")


@pytest.fixture
def ops() -> LinearOps:
    return UNQUANTIZED.on_cpu(CpuKernels())


def _params(*, bias: bool) -> Params:
    torch.manual_seed(0)
    params = {"weight": torch.randn(_OUT, _IN)}
    return {**params, "bias": torch.randn(_OUT)} if bias else params


def _product(params: Params, x: Tensor) -> Tensor:
    bias = params.get("bias")
    return functional.linear(x.double(), params["weight"].double(), None if bias is None else bias.double())


def _check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
def test_large_linears_are_those_of_double_precision(ops: LinearOps, rows: int, bias: bool) -> None:
    params = _params(bias=bias)
    x, residual = torch.randn(rows, _IN), torch.randn(rows, _OUT)
    product = _product(params, x)

    _check(ops.multiply(params, x), product)
    out = torch.empty(rows, _OUT)
    assert ops.multiply(params, x, out) is out
    _check(out, product)
    for activation, expected in (
        ("gelu_tanh", functional.gelu(product, approximate="tanh")),
        ("gelu", functional.gelu(product)),
        ("silu", functional.silu(product)),
    ):
        _check(ops.activate(params, Stream(x), None, activation), expected)
    for scale in (1.0, 0.5):
        stream = Stream(residual.clone())
        stream.add(torch.ones_like(residual))  # deferred, and so added first
        ops.add(params, x, stream, scale)
        _check(stream.settled(), residual.double() + 1 + scale * product)


def test_a_large_linear_norms_its_rows_and_reads_rows_of_any_strides(ops: LinearOps) -> None:
    params, x = _params(bias=True), torch.randn(5, 2 * _IN)[:, :_IN]
    norm = Norm(torch.rand(_IN), 1e-5)

    _check(ops.multiply(params, x), _product(params, x))
    normed = functional.rms_norm(x.double(), (_IN,), norm.weight.double(), norm.eps)
    _check(ops.project(params, Stream(x.contiguous()), norm), _product(params, normed))


def test_new_values_in_the_memory_of_a_large_matrix_are_multiplied_at_once(ops: LinearOps) -> None:
    params, x = _params(bias=False), torch.randn(1, _IN)
    prepared = ops.prepared(params)
    ops.multiply(prepared, x)

    params["weight"].neg_()

    _check(ops.multiply(prepared, x), _product(params, x))
    assert prepared["weight"].data_ptr() == params["weight"].data_ptr(), "a copy takes twice the memory"


@pytest.mark.parametrize(
    ("shape", "dtype", "large"),
    [
        ((512, 512), torch.float32, True),
        ((511, 512), torch.float32, False),
        ((4096, 64), torch.float32, True),
        ((4096, 4096), torch.bfloat16, False),
    ],
)
def test_large_matrices_of_float32_are_multiplied_by_onednn(
    ops: LinearOps, shape: tuple[int, int], dtype: torch.dtype, large: bool
) -> None:
    weight = torch.zeros(shape, dtype=dtype)
    with _Called() as called:
        ops.multiply({"weight": weight}, torch.zeros(2, shape[1], dtype=dtype))

    assert is_large(weight) == large
    assert ("mkldnn::_linear_pointwise" in called.names) == large
