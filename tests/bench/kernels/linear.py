"""Benchmark rows of small linears: a decode step's projections with fused ops, and cuBLAS without those.

Rows are the sizes for which an engine takes small linears.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from bench.kernels.case import BYTES, Case, ModelShape, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor
from torch.nn import functional

from baton.kernels.linear.small_linear import Workspace, beats_blas, small_linear
from baton.kernels.table import SMALL_ADD, SMALL_GATE, SMALL_PROJECT

_TOKENS = (1, 2, 16, 32, 64)
_EPS = 1e-6
_CHECKED_FEATURES = 2048


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer of a decoder."""

    name: str
    num_out: int
    num_in: int
    normed: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the weight."""
        return self.num_out * (2 if self.gated else 1)


def linear_cases(shape: ModelShape) -> list[Case]:
    """Returns a case for each projection and number of tokens."""
    return [
        Case(
            "small linear",
            f"{projection.name} {projection.num_in} -> {projection.num_rows}, M={num_tokens}",
            BYTES,
            2.0 * projection.num_rows * projection.num_in,
            functools.partial(_prepare, projection, num_tokens),
            "cuBLAS",
        )
        for projection in _projections(shape)
        for num_tokens in _TOKENS
        if _taken(projection, num_tokens)
    ]


def _taken(projection: Projection, num_tokens: int) -> bool:
    if not projection.residual:
        return num_tokens in (SMALL_GATE if projection.gated else SMALL_PROJECT).tokens
    return num_tokens in SMALL_ADD.tokens and beats_blas(num_tokens, projection.num_rows, projection.num_in)


def _projections(shape: ModelShape) -> list[Projection]:
    hidden, heads = shape.hidden, shape.num_q_heads * shape.head_dim
    qkv = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return [
        Projection("qkv", qkv, hidden, normed=True),
        Projection("o", hidden, heads, residual=True),
        Projection("gate_up", shape.ffn, hidden, normed=True, gated=True),
        Projection("down", hidden, shape.ffn, residual=True),
        Projection("lm_head", shape.vocab, hidden, normed=True),
    ]


def _prepare(projection: Projection, num_tokens: int, device: torch.device) -> Prepared:
    size = (projection.num_rows, projection.num_in)
    copies = num_copies(2 * projection.num_rows * projection.num_in)
    weights = [torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for _ in range(copies)]
    x = torch.randn(num_tokens, projection.num_in, device=device).bfloat16()
    norm = (torch.rand(projection.num_in, device=device) + 0.5).bfloat16() if projection.normed else None
    residual = torch.randn(num_tokens, projection.num_out, device=device).bfloat16() if projection.residual else None
    workspace = Workspace(device)

    def launch(weight: Tensor) -> Tensor:
        return small_linear(x, weight, workspace, norm=norm, eps=_EPS, gated=projection.gated, residual=residual)

    def error() -> float:
        checked = min(_CHECKED_FEATURES, projection.num_out)
        expected = _expected(projection, x, weights[0], norm, residual, checked)
        return relative_error(launch(weights[0])[:, :checked], expected)

    return Prepared(
        [functools.partial(launch, weight) for weight in weights],
        error,
        [functools.partial(functional.linear, x, weight) for weight in weights],
    )


def _expected(
    projection: Projection, x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, checked: int
) -> Tensor:
    """Returns the first output features, in fp64."""
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) * norm.double()
    out = wide @ weight[:checked].double().T
    if projection.gated:
        up = wide @ weight[projection.num_out : projection.num_out + checked].double().T
        out = functional.silu(out) * up
    return out if residual is None else out + residual[:, :checked].double()
