"""Benchmark rows of experts that stay packed: bytes of the experts that are hit, or operations for many tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from bench.kernels.case import BYTES, FLOPS, Case, Prepared, relative_error
from bench.kernels.experts import SHAPES, ExpertsShape
from bench.kernels.quantized import FORMS
from torch import Tensor

from baton.kernels import reference
from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.packed.weight import PackedWeight, rounds
from baton.kernels.table import Case as Choice
from baton.kernels.table import find

_TOKENS = (1, 16, 64, 256, 4096)
_MEMORY_BOUND = 256  # tokens
_CHECKED = 2  # tokens
_ROUNDED = 1e-1  # of activations in e4m3, twice
_QWEN, _GPT_OSS = SHAPES[:2]
_FORMS = (
    (_QWEN, "fp8, blocks of 128x128"),
    (_QWEN, "gptq and awq, groups of 128, zeros"),
    (_GPT_OSS, "mxfp4"),
)


def quantized_experts_cases() -> list[Case]:
    """Returns a case for each format and number of tokens."""
    return [_case(shape, form, num_tokens) for shape, form in _FORMS for num_tokens in _TOKENS]


def _case(shape: ExpertsShape, form: str, num_tokens: int) -> Case:
    ids = _ids(shape, num_tokens)[0]
    num_hit = len(ids.unique())
    expert_bytes = 3 * shape.hidden * shape.size * FORMS[form].bits / 8
    moved = num_hit * expert_bytes + 2 * 2 * num_tokens * shape.hidden
    few = num_tokens <= _MEMORY_BOUND
    sizes = f"top {shape.top_k} of {shape.num_experts}, {num_hit} hit, {shape.hidden}/{shape.size}"
    return Case(
        f"experts, {form}",
        f"{shape.name}: {sizes}, M={num_tokens}",
        BYTES if few else FLOPS,
        float(moved if few else 2 * 3 * num_tokens * shape.top_k * shape.hidden * shape.size),
        functools.partial(_prepare, shape, form, num_tokens),
    )


def _ids(shape: ExpertsShape, num_tokens: int) -> list[Tensor]:
    """Returns the experts of each launch. One token's are others in each, so that none is in L2."""
    random = torch.Generator().manual_seed(num_tokens)
    if num_tokens == 1:
        order = torch.randperm(shape.num_experts, generator=random)
        return list(order.view(-1, 1, shape.top_k).unbind())
    return [torch.rand(num_tokens, shape.num_experts, generator=random).topk(shape.top_k, dim=-1).indices]


def _prepare(shape: ExpertsShape, form: str, num_tokens: int, device: torch.device) -> Prepared:
    up, down = (_stack(form, shape.num_experts, *size, device) for size in _sizes(shape))
    if shape is _GPT_OSS:
        up, down = (_biased(one, shape.num_experts, device) for one in (up, down))
    x = torch.randn(num_tokens, shape.hidden, device=device).bfloat16()
    weights = torch.rand(num_tokens, shape.top_k, device=device)
    rounding = rounds(up) and rounds(down)
    row = find(
        "run_experts",
        Choice(
            "cuda",
            torch.cuda.get_device_capability(device)[0],
            num_pairs=num_tokens * shape.top_k,
            num_experts=shape.num_experts,
            weights="rounding" if rounding else "packed",
        ),
    )
    run = row.load()

    def launch(ids: Tensor) -> Tensor:
        out: Tensor = run(x, weights, ids, up, down, shape.gate)
        return out

    each = [ids.int().to(device) for ids in _ids(shape, num_tokens)]

    def error() -> float:
        few = slice(0, _CHECKED)
        expected = _expected(x[few].float(), weights[few], each[0][few], up, down, shape)
        return relative_error(launch(each[0])[few], expected)

    tolerance = _ROUNDED if "rounded" in row.path else 1e-2
    return Prepared([functools.partial(launch, ids) for ids in each], error, tolerance=tolerance)


def _sizes(shape: ExpertsShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the rows and columns of one expert's matrices."""
    return (2 * shape.size, shape.hidden), (shape.hidden, shape.size)


def _stack(form: str, num_experts: int, n: int, k: int, device: torch.device) -> PackedWeight:
    """Returns random experts: the rows of one matrix, which are the first expert's, then the next one's."""
    whole = FORMS[form].make(num_experts * n, k, device)
    first = _changed(whole, lambda tensor: tensor[: len(tensor) // num_experts])
    return first._replace(num_rows=n, num_experts=num_experts)


def _biased(weight: PackedWeight, num_experts: int, device: torch.device) -> PackedWeight:
    return weight._replace(bias=torch.randn(num_experts, weight.num_rows, device=device).bfloat16()[0])


def _changed(weight: PackedWeight, change: Callable[[Tensor], Tensor]) -> PackedWeight:
    changed: dict[str, Any] = {
        name: change(value) for name, value in weight._asdict().items() if isinstance(value, Tensor)
    }
    return weight._replace(**changed)


def _expert(weight: PackedWeight, expert: int) -> PackedWeight:
    """Returns one of the experts that follow the first in memory."""
    return _changed(
        weight, lambda one: torch.as_strided(one, one.shape, one.stride(), one.storage_offset() + expert * one.numel())
    )._replace(num_experts=1)


def _expected(
    x: Tensor, weights: Tensor, ids: Tensor, up: PackedWeight, down: PackedWeight, shape: ExpertsShape
) -> Tensor:
    """Returns the reference of the used experts, in fp32."""
    used, numbers = ids.unique(return_inverse=True)
    matrices, biases = [], []
    for stack, (_, k) in zip((up, down), _sizes(shape), strict=True):
        each = [_expert(stack, expert) for expert in used.tolist()]
        matrices.append(torch.stack([dequantize(one, k, torch.float32) for one in each]))
        own = [one.bias.float() for one in each if one.bias is not None]
        biases.append(torch.stack(own) if own else None)
    return reference.run_experts(x, weights, numbers, *matrices, shape.gate, *biases)
