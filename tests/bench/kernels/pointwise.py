"""Benchmark rows of the ops between matrix products: norms, rotary embedding with the cache write, the gate."""

from __future__ import annotations

import functools

import torch
from bench.kernels.case import BYTES, Case, ModelShape, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.activation.silu_mul import silu_mul
from baton.kernels.norm.rms_norm import rms_norm
from baton.kernels.rope.rope_cache import rope_and_cache

_TOKENS = (1, 64, 256, 8192)
_EPS = 1e-6
_MAX_POSITION = 16384
_ELEMENT = 2  # bytes


def pointwise_cases(shape: ModelShape, block_size: int) -> list[Case]:
    """Returns a case for each op and number of tokens."""
    qkv = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    cases = []
    for count in _TOKENS:
        norm_bytes = 4.0 * count * shape.hidden * _ELEMENT
        cases.append(
            Case(
                "rms_norm + residual",
                f"{count} x {shape.hidden}",
                BYTES,
                norm_bytes,
                functools.partial(_prepare_norm, count, shape.hidden),
            )
        )
    for normed in (False, True):
        for count in _TOKENS:
            # Q, K and V are read and written once. The cosines and sines of a position are fp32.
            rope_bytes = 2.0 * count * qkv * _ELEMENT + 4.0 * count * shape.head_dim
            name = "rope_cache + q/k norm" if normed else "rope_cache"
            prepare = functools.partial(_prepare_rope, shape, block_size, count, normed)
            cases.append(Case(name, f"{count} x {qkv}", BYTES, rope_bytes, prepare))
    for count in _TOKENS:
        gate_bytes = 3.0 * count * shape.ffn * _ELEMENT
        prepare = functools.partial(_prepare_gate, count, shape.ffn)
        cases.append(Case("silu_mul", f"{count} x {shape.ffn}", BYTES, gate_bytes, prepare))
    return cases


def _prepare_norm(count: int, size: int, device: torch.device) -> Prepared:
    copies = num_copies(4 * count * size * _ELEMENT)
    inputs = [_random((2, count, size), device) for _ in range(copies)]
    weight = (torch.rand(size, device=device) + 0.5).bfloat16()

    def error() -> float:
        x, residual = inputs[0]
        own, wide = residual.clone(), residual.float()
        expected = reference.rms_norm(x.float(), weight.float(), _EPS, residual=wide)
        out = rms_norm(x, weight, _EPS, residual=own)
        return max(relative_error(out, expected), relative_error(own, wide))

    launches = [functools.partial(rms_norm, x, weight, _EPS, residual=residual) for x, residual in inputs]
    return Prepared(launches, error)


def _prepare_rope(shape: ModelShape, block_size: int, count: int, normed: bool, device: torch.device) -> Prepared:
    width = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    copies = num_copies(2 * count * width * _ELEMENT)
    inputs = [_random((count, width), device) for _ in range(copies)]
    num_blocks = -(-count // block_size)
    size = (num_blocks, 2, shape.num_kv_heads, block_size, shape.head_dim)
    caches = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(copies)]
    positions = torch.randint(_MAX_POSITION, (count,), dtype=torch.int32, device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:count].int()
    angles = torch.rand(_MAX_POSITION, shape.head_dim // 2, device=device) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    weights = (torch.rand(2, shape.head_dim, device=device) + 0.5).bfloat16() if normed else None

    def launch(qkv: Tensor, cache: Tensor) -> None:
        q_norm, k_norm = (None, None) if weights is None else weights
        rope_and_cache(qkv, cache, positions, slots, cos_sin, shape.num_q_heads, q_norm=q_norm, k_norm=k_norm, eps=_EPS)

    def error() -> float:
        qkv, cache = inputs[0].clone(), torch.zeros_like(caches[0])
        wide, wide_cache = qkv.float(), cache.float()
        launch(qkv, cache)
        q_norm, k_norm = (None, None) if weights is None else weights.float()
        reference.rope_and_cache(
            wide, wide_cache, positions, slots, cos_sin, shape.num_q_heads, q_norm=q_norm, k_norm=k_norm, eps=_EPS
        )
        rotated = shape.num_q_heads * shape.head_dim
        return max(relative_error(qkv[:, :rotated], wide[:, :rotated]), relative_error(cache, wide_cache))

    return Prepared([functools.partial(launch, *pair) for pair in zip(inputs, caches, strict=True)], error)


def _prepare_gate(count: int, size: int, device: torch.device) -> Prepared:
    inputs = [_random((count, 2 * size), device) for _ in range(num_copies(3 * count * size * _ELEMENT))]

    def error() -> float:
        return relative_error(silu_mul(inputs[0]), reference.silu_mul(inputs[0].float()))

    return Prepared([functools.partial(silu_mul, gate_up) for gate_up in inputs], error)


def _random(size: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device)
