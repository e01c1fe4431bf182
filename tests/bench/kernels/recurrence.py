"""Benchmark rows of recurrences: decode steps as shares of a device copy, chunks as shares of a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from bench.kernels.case import BYTES, FLOPS, Case, Prepared, relative_error
from bench.kernels.timing import num_copies
from torch import Tensor

from baton.kernels import reference
from baton.kernels.recurrence.causal_conv import causal_conv
from baton.kernels.recurrence.delta_chunks import gated_delta_chunks
from baton.kernels.recurrence.delta_step import gated_delta_step
from baton.kernels.recurrence.gated_norm import gated_rms_norm
from baton.kernels.recurrence.state_space_chunks import state_space_chunks
from baton.kernels.recurrence.state_space_step import state_space_step
from baton.kernels.recurrent_states import CHUNK, DeltaGates, States, StepSizes

_ROWS = (1, 64, 256)
_DRAFTS = 4  # tokens a row of a speculative step
_LONG = (1024, 8192)  # tokens
_HALF = 2  # bytes
_EPS = 1e-6
# us of a layer, 256 rows: vLLM on an H200. States in fp32 cannot be much faster: 268 MB take 56 us at 4.8 TB/s.
_VLLM_STEP_US = {"Qwen3-Next TP4": 60.3}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of one recurrent layer."""

    name: str
    kind: Literal["delta", "channel", "space"]
    groups: int  # key heads, or groups of B and C
    heads: int
    rows: int  # of a state
    columns: int

    @property
    def sizes(self) -> str:
        return f"{self.name}: {self.groups}/{self.heads} heads, {self.rows}x{self.columns}"

    @property
    def state_elements(self) -> int:
        return self.heads * self.rows * self.columns

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's inputs and outputs, in 16 bits."""
        gates = self.heads * (1 + self.rows * (self.kind == "channel") + (self.kind == "delta"))
        return _HALF * (2 * self.groups * self.rows + 2 * self.heads * self.columns + gates)

    @property
    def chunk_operations(self) -> int:
        """Operations of the matrix products of one chunk."""
        inner, across = CHUNK * CHUNK, CHUNK * self.rows * self.columns
        if self.kind == "space":
            return 2 * self.heads * (inner * (self.rows + self.columns) + 2 * across)
        return 2 * self.heads * (inner * (3 * self.rows + 2 * self.columns) + 3 * across)


STEP_SHAPES = (
    Shape("Qwen3-Next TP4", "delta", 4, 8, 128, 128),
    Shape("Kimi-Linear TP4", "channel", 8, 8, 128, 128),
    Shape("Nemotron-H-8B", "space", 8, 128, 128, 64),
)
CHUNK_SHAPES = (
    Shape("Qwen3-Next", "delta", 16, 32, 128, 128),
    Shape("Kimi-Linear", "channel", 32, 32, 128, 128),
    Shape("Nemotron-H-8B", "space", 8, 128, 128, 64),
)


def recurrence_cases() -> list[Case]:
    """Returns the cases of steps, chunks, convolutions and gated norms."""
    steps = [_step(shape, rows, 1, torch.float32) for shape in STEP_SHAPES for rows in _ROWS]
    speculative = [_step(shape, _ROWS[-1], _DRAFTS, torch.float32) for shape in STEP_SHAPES]
    halved = [_step(STEP_SHAPES[0], _ROWS[-1], 1, torch.bfloat16)]
    chunks = [_chunks(shape, num_tokens) for shape in CHUNK_SHAPES for num_tokens in _LONG]
    convolutions = [_conv(256, 1, 2048), _conv(256, 1, 8192), _conv(1, 8192, 8192)]
    return [*steps, *speculative, *halved, *chunks, *convolutions, *(_norm(count, 8, 128) for count in (256, 8192))]


def _step(shape: Shape, rows: int, tokens: int, stored: torch.dtype) -> Case:
    state_bytes = rows * shape.state_elements * stored.itemsize
    plain = tokens == 1 and stored == torch.float32 and rows == _ROWS[-1]
    name = "state_space_step" if shape.kind == "space" else "gated_delta_step"
    extra = "" if stored == torch.float32 else ", bf16 states"
    return Case(
        name,
        f"{shape.sizes}, {rows} rows x {tokens}{extra}",
        BYTES,
        2.0 * state_bytes + rows * tokens * shape.token_bytes,
        functools.partial(_prepare, shape, [tokens] * rows, stored),
        peer="vLLM" if shape.name in _VLLM_STEP_US else "",
        peer_us=_VLLM_STEP_US.get(shape.name) if plain else None,
    )


def _chunks(shape: Shape, num_tokens: int) -> Case:
    return Case(
        "state_space_chunks" if shape.kind == "space" else "gated_delta_chunks",
        f"{shape.sizes}, 1 x {num_tokens}",
        FLOPS,
        float(shape.chunk_operations * num_tokens // CHUNK),
        functools.partial(_prepare, shape, [num_tokens], torch.float32, chunked=True),
    )


def _prepare(
    shape: Shape, lengths: Sequence[int], stored: torch.dtype, device: torch.device, *, chunked: bool = False
) -> Prepared:
    num_seqs, num_tokens = len(lengths), sum(lengths)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    touched = num_seqs * shape.state_elements * stored.itemsize + num_tokens * shape.token_bytes
    copies = num_copies(touched)
    inputs = [_inputs(shape, num_tokens, device) for _ in range(copies)]
    states = [_states(num_seqs, shape.heads, shape.rows, shape.columns, stored, device) for _ in range(copies)]
    run, oracle = _ops(shape, chunked)

    def error() -> float:
        mine, theirs = (States(states[0].pool.clone(), states[0].read, states[0].write) for _ in range(2))
        out, expected = run(*inputs[0], mine, bounds), oracle(*inputs[0], theirs, bounds)
        return max(relative_error(out, expected), relative_error(mine.pool, theirs.pool))

    launches = [functools.partial(run, *some, own, bounds) for some, own in zip(inputs, states, strict=True)]
    return Prepared(launches, error)


def _ops(shape: Shape, chunked: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    if shape.kind == "space":
        return (
            (state_space_chunks, reference.state_space_chunks)
            if chunked
            else (state_space_step, reference.state_space_step)
        )
    return (
        (gated_delta_chunks, reference.gated_delta_chunks)
        if chunked
        else (gated_delta_step, reference.gated_delta_step)
    )


def _inputs(shape: Shape, num_tokens: int, device: torch.device) -> tuple[Any, ...]:
    def random(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, device=device).bfloat16()

    value = random(shape.heads, shape.columns)
    first, second = random(shape.groups, shape.rows), random(shape.groups, shape.rows)
    rate = torch.linspace(-2.0, 1.0, shape.heads, device=device)
    if shape.kind == "space":
        sizes = StepSizes(random(shape.heads), rate, torch.zeros_like(rate))
        return value, first, second, sizes, torch.ones_like(rate)
    channels = (shape.rows,) if shape.kind == "channel" else ()
    bias = torch.zeros(shape.heads, *channels, device=device)
    return first, second, value, DeltaGates(random(shape.heads, *channels), random(shape.heads), rate, bias)


def _states(
    num_seqs: int, num_heads: int, rows: int, columns: int, stored: torch.dtype, device: torch.device
) -> States:
    pool = torch.randn(num_seqs * num_heads, rows, columns, device=device).to(stored)
    ids = torch.randperm(len(pool), device=device).int().view(num_seqs, num_heads)
    return States(pool, ids, ids)


def _conv(num_seqs: int, tokens: int, channels: int) -> Case:
    moved = _HALF * channels * num_seqs * (2 * tokens + 2 * 3)
    prepare = functools.partial(_prepare_conv, num_seqs, tokens, channels)
    return Case("causal_conv", f"{num_seqs} x {tokens}, {channels} channels, 4 taps", BYTES, float(moved), prepare)


def _prepare_conv(num_seqs: int, tokens: int, channels: int, device: torch.device) -> Prepared:
    bounds = (torch.arange(num_seqs + 1, device=device) * tokens).int()
    weight = torch.randn(channels, 4, device=device).bfloat16()
    copies = num_copies(_HALF * channels * num_seqs * (tokens + 3))
    inputs = [torch.randn(num_seqs * tokens, channels, device=device).bfloat16() for _ in range(copies)]
    states = [_states(num_seqs, 1, 3, channels, torch.bfloat16, device) for _ in range(copies)]

    def error() -> float:
        mine, theirs = (States(states[0].pool.clone(), states[0].read, states[0].write) for _ in range(2))
        out = causal_conv(inputs[0], weight, mine, bounds)
        expected = reference.causal_conv(inputs[0], weight, theirs, bounds)
        return max(relative_error(out, expected), relative_error(mine.pool, theirs.pool))

    launches = [functools.partial(causal_conv, x, weight, own, bounds) for x, own in zip(inputs, states, strict=True)]
    return Prepared(launches, error)


def _norm(num_rows: int, groups: int, size: int) -> Case:
    moved = 3.0 * _HALF * num_rows * groups * size
    prepare = functools.partial(_prepare_norm, num_rows, groups, size)
    return Case("gated_rms_norm", f"{num_rows} x {groups} x {size}", BYTES, moved, prepare)


def _prepare_norm(num_rows: int, groups: int, size: int, device: torch.device) -> Prepared:
    copies = num_copies(2 * _HALF * num_rows * groups * size)
    pairs = [torch.randn(2, num_rows, groups * size, device=device).bfloat16() for _ in range(copies)]
    weight = torch.rand(size, device=device).bfloat16()
    options: dict[str, Any] = {"group_size": size, "norm_first": True}

    def error() -> float:
        out = gated_rms_norm(*pairs[0], weight, _EPS, **options)
        return relative_error(out, reference.gated_rms_norm(*pairs[0], weight, _EPS, **options))

    launches = [functools.partial(gated_rms_norm, *pair, weight, _EPS, **options) for pair in pairs]
    return Prepared(launches, error)
