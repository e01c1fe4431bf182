"""Benchmark rows of linears with packed weights: bytes for few tokens, operations for many; cuBLAS with bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from bench.kernels.case import BYTES, FLOPS, Case, ModelShape, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.quantized.choice import FEW, TWO_PARTS
from baton.kernels.linear.quantized.dequantize import dequantize
from baton.kernels.linear.quantized.fp8 import scaled_mm_linear
from baton.kernels.linear.quantized.linear import quantized_linear
from baton.kernels.linear.small_linear import Workspace
from baton.kernels.packed.weight import PackedWeight, rounds

_FEW_TOKENS, _MANY_TOKENS = (1, 4, 16, 64), (512, 4096)
_CHECKED_TOKENS = 64
_ROUNDED = 5e-2  # of tokens in e4m3
_GROUP, _BLOCK = 128, 128


@dataclass(frozen=True, slots=True)
class PackedForm:
    """A format, by a function that returns random weights [n, k] of it."""

    make: Callable[[int, int, torch.device], PackedWeight]
    bits: float  # of a weight, with its scales


def quantized_cases(shape: ModelShape) -> list[Case]:
    """Returns a case for each format, linear of a decoder layer, and number of tokens."""
    sizes = [
        (shape.num_q_heads * shape.head_dim, shape.hidden),
        (2 * shape.ffn, shape.hidden),
        (shape.hidden, shape.ffn),
    ]
    return [
        case
        for name, form in FORMS.items()
        for n, k in sizes
        for case in (*_few(name, form, n, k), *_many(name, form, n, k))
    ]


def _few(name: str, form: PackedForm, n: int, k: int) -> list[Case]:
    work = n * k * form.bits / 8
    return [
        Case(name, f"{k} -> {n}, M={m}", BYTES, work, functools.partial(_prepare, form, n, k, m, False), "cuBLAS bf16")
        for m in _FEW_TOKENS
    ]


def _many(name: str, form: PackedForm, n: int, k: int) -> list[Case]:
    ours = [
        Case(name, f"{k} -> {n}, M={m}", FLOPS, 2.0 * m * n * k, prepare, "cuBLAS bf16")
        for m in _MANY_TOKENS
        for prepare in (functools.partial(_prepare, form, n, k, m, False),)
    ]
    if name != "fp8, a scale a row":
        return ours
    return ours + [
        Case(f"{name}, _scaled_mm", f"{k} -> {n}, M={m}", FLOPS, 2.0 * m * n * k, prepare, "cuBLAS bf16")
        for m in _MANY_TOKENS
        for prepare in (functools.partial(_prepare, form, n, k, m, True),)
    ]


def _prepare(form: PackedForm, n: int, k: int, m: int, by_torch: bool, device: torch.device) -> Prepared:
    copies = num_copies(int(n * k * form.bits / 8)) if m <= FEW else 1
    weights = [form.make(n, k, device) for _ in range(copies)]
    x = torch.randn(m, k, device=device).bfloat16()
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    workspace = Workspace(device, 1 << 21)

    def launch(weight: PackedWeight) -> Tensor:
        return scaled_mm_linear(x, weight, out) if by_torch else quantized_linear(x, weight, workspace, out)

    def error() -> float:
        whole = dequantize(weights[0], k, torch.float32)
        if weights[0].order is not None:
            whole = whole[:, weights[0].order[0].argsort()]
        return relative_error(launch(weights[0])[:_CHECKED_TOKENS], x[:_CHECKED_TOKENS].double() @ whole.double().t())

    plain = [dequantize(weights[0], k, torch.bfloat16) for _ in range(num_copies(2 * n * k) if m <= FEW else 1)]
    return Prepared(
        [functools.partial(launch, weight) for weight in weights],
        error,
        [functools.partial(functional.linear, x, weight) for weight in plain],
        _ROUNDED if m > TWO_PARTS and rounds(weights[0]) else 1e-2,
    )


def _e4m3(n: int, k: int, device: torch.device) -> Tensor:
    return (torch.randn(n, k, device=device) * 64).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _words(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns), dtype=torch.int32, device=device)


def _scales(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.rand(rows, columns, device=device) * 1e-3 + 1e-4


def _fp8_rows(n: int, k: int, device: torch.device) -> PackedWeight:
    return PackedWeight("e4m3", _e4m3(n, k, device), n, row_scale=_scales(n, 1, device))


def _fp8_blocks(n: int, k: int, device: torch.device) -> PackedWeight:
    scale = _scales(-(-n // _BLOCK), -(-k // _BLOCK), device)
    return PackedWeight("e4m3", _e4m3(n, k, device), n, scale=scale, scale_rows=_BLOCK, group=_BLOCK)


def _gptq(n: int, k: int, device: torch.device) -> PackedWeight:
    zero = _words(n // 8, k // _GROUP, device)
    scale = _scales(n, k // _GROUP, device)
    return PackedWeight("words", _words(n, k // 8, device), n, 4, scale, group=_GROUP, zero=zero, zero_plus=1)


def _symmetric(n: int, k: int, device: torch.device) -> PackedWeight:
    scale = _scales(n, k // _GROUP, device)
    return PackedWeight("words", _words(n, k // 8, device), n, 4, scale, group=_GROUP)


def _ordered(n: int, k: int, device: torch.device) -> PackedWeight:
    order = torch.randperm(k, device=device).int().view(1, k)
    return _gptq(n, k, device)._replace(order=order)


def _nf4(n: int, k: int, device: torch.device) -> PackedWeight:
    return PackedWeight("nf4", _pairs(n, k, device), n, 4, _scales(n, k // 64, device), group=64)


def _pairs(n: int, k: int, device: torch.device) -> Tensor:
    return torch.randint(256, (n, k // 2), dtype=torch.uint8, device=device)


def _mxfp4(n: int, k: int, device: torch.device) -> PackedWeight:
    scale = torch.randint(115, 121, (n, k // 32), dtype=torch.uint8, device=device)
    return PackedWeight("e2m1", _pairs(n, k, device), n, 4, scale, group=32)


def _nvfp4(n: int, k: int, device: torch.device) -> PackedWeight:
    scale = (torch.rand(n, k // 16, device=device) * 100 + 1).to(torch.float8_e4m3fn)
    row_scale = torch.full((n, 1), 1e-4, device=device)
    return PackedWeight("e2m1", _pairs(n, k, device), n, 4, scale, group=16, row_scale=row_scale)


FORMS: Mapping[str, PackedForm] = {
    "fp8, a scale a row": PackedForm(_fp8_rows, 8),
    "fp8, blocks of 128x128": PackedForm(_fp8_blocks, 8),
    "gptq and awq, groups of 128, zeros": PackedForm(_gptq, 4 + 36 / _GROUP),
    "gptq in the order of activations": PackedForm(_ordered, 4 + 36 / _GROUP),
    "packed integers, groups of 128": PackedForm(_symmetric, 4 + 32 / _GROUP),
    "mxfp4": PackedForm(_mxfp4, 4 + 8 / 32),
    "nvfp4": PackedForm(_nvfp4, 4 + 8 / 16),
    "bitsandbytes nf4": PackedForm(_nf4, 4 + 32 / 64),
}
