"""Blocks of GGUF in planes mean what the package says, and the GPU's kernels multiply with them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from support.kernels.harness import BOUNDS, cases, poisoned, relative_error
from torch import Tensor

from baton.kernels.linear.quantized.choice import MANY
from baton.kernels.linear.quantized.linear import quantized_linear
from baton.kernels.linear.small_linear import Workspace
from baton.rpc.errors import InvalidRequest
from baton.worker.quantization.base import LinearShape, Params, Part
from baton.worker.quantization.formats.gguf import Gguf
from baton.worker.quantization.quantized.gguf_blocks import BLOCK_TYPES
from baton.worker.quantization.quantized.gguf_planes import GgufPlanes
from baton.worker.quantization.quantized.method import PackedMethod

# A type of each way that the kernels read: integers of 2, 4 and 8 bits, groups of 16 and 32, with and without zeros.
NAMES = ["Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
FP32, BF16 = torch.float32, torch.bfloat16
SMALL = [(name, FP32, (1, 3)) for name in NAMES]
GRID = [(name, BF16, (1, 2, 16, 64, 65, 200, MANY)) for name in NAMES] + [("Q4_K", FP32, (1, 3, 70))]
ROWS = (48, 16)  # of two parts


def blocks_of(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Returns random blocks [rows, bytes], and the weights that the package reads from them."""
    kind, numbers = BLOCK_TYPES[name], np.random.default_rng(7)
    made = numbers.integers(0, 256, (16 * rows * columns // kind.num_values, kind.num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        means = gguf.quants.dequantize(made, Kind[name])
        fits = np.isfinite(means).all(1) & (np.abs(means).max(1) < 100)
    made, means = made[fits][: rows * columns // kind.num_values], means[fits][: rows * columns // kind.num_values]
    assert len(made) == rows * columns // kind.num_values
    return torch.from_numpy(made).view(rows, -1), torch.from_numpy(means).view(rows, columns)


def loaded(name: str, columns: int, dtype: torch.dtype, device: str) -> tuple[PackedMethod, Params, Tensor]:
    """Returns a linear of two parts, and the weight that it means."""
    shape = LinearShape([Part(f"part{index}", rows) for index, rows in enumerate(ROWS)], columns, bias=True)
    types = {part.name: name for part in shape.parts}
    method = Gguf({"tensors": types, "planes": True}).packed("part0")
    assert isinstance(method, GgufPlanes)
    params = method.create(shape, dtype, torch.device(device))
    made = {part.name: blocks_of(name, part.rows, columns) for part in shape.parts}

    def source(wanted: str, size: tuple[int, ...], into: Tensor) -> None:
        if wanted.endswith(".bias"):
            into.zero_()
        else:
            assert size == (len(into), columns)
            into.copy_(made[wanted.removesuffix(".weight")][0])

    finish = method.load(params, shape, source)
    assert finish is not None
    finish()
    return method, params, torch.cat([means for _, means in made.values()]).to(device)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_planes_mean_what_the_package_reads(name: str) -> None:
    method, params, meant = loaded(name, 512, FP32, "cpu")
    error = (method.dequantized(params, slice(0, sum(ROWS))) - meant).abs()
    largest = (
        meant.unflatten(1, (-1, BLOCK_TYPES[name].group)).abs().amax(2).repeat_interleave(BLOCK_TYPES[name].group, 1)
    )
    assert bool((error <= 2e-6 * largest).all())
    bits = sum(tensor.nbytes for param, tensor in params.items() if param != "bias") * 8 / meant.numel()
    assert bits <= (10 if BLOCK_TYPES[name].bits == 8 else 8)


def test_a_group_with_a_scale_of_0_keeps_its_least_value() -> None:
    blocks, _ = blocks_of("Q4_1", 2, 64)
    halves = blocks.view(-1, 20)[:, :4].contiguous().view(torch.float16)
    halves[0], halves[1] = torch.tensor([0.0, -0.5]), torch.tensor([0.0, 0.0])
    blocks.view(-1, 20)[:, :4] = halves.view(torch.uint8)
    method = GgufPlanes("Q4_1", BLOCK_TYPES["Q4_1"])
    shape = LinearShape([Part("part", 2)], 64)
    params = method.create(shape, FP32, torch.device("cpu"))
    finish = method.load(params, shape, lambda name, size, into: into.copy_(blocks))
    assert finish is not None
    finish()
    values = method.dequantized(params, slice(0, 2)).flatten()
    assert bool((values[:32] == -0.5).all())
    assert bool((values[32:64] == 0).all())


def test_a_scale_that_is_not_finite_is_refused_by_name() -> None:
    blocks, _ = blocks_of("Q8_0", 2, 64)
    blocks.view(-1, 34)[1, :2] = torch.tensor([float("nan")]).half().view(torch.uint8)
    method = GgufPlanes("Q8_0", BLOCK_TYPES["Q8_0"])
    shape = LinearShape([Part("layers.3.up", 2)], 64)
    params = method.create(shape, FP32, torch.device("cpu"))
    finish = method.load(params, shape, lambda name, size, into: into.copy_(blocks))
    assert finish is not None
    with pytest.raises(InvalidRequest, match=r"layers\.3\.up\.weight holds 1 blocks whose scales are not .* row 0"):
        finish()


@pytest.mark.parametrize(("case", "device"), cases(SMALL, GRID))
def test_products_equal_those_with_the_weights_that_are_meant(
    case: tuple[str, torch.dtype, tuple[int, ...]], device: str
) -> None:
    name, dtype, tokens = case
    columns = 512 if device == "cpu" else 2048
    method, params, meant = loaded(name, columns, dtype, device)
    workspace = Workspace(torch.device(device), 1 << 21)
    for num_tokens in tokens:
        x = torch.randn(num_tokens, columns, device=device).to(dtype)
        out = poisoned(num_tokens, sum(ROWS), dtype=dtype, device=device)
        assert quantized_linear(x, method.packed_weight(params), workspace, out) is out
        assert relative_error(out, x.double() @ meant.double().t()) <= BOUNDS[dtype], num_tokens
