"""Kernels of recurrences for few tokens, and of what surrounds them, against the reference."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pytest
import torch
from support.kernels.compile_hopper import compiled_for_hopper
from support.kernels.harness import BOUNDS, NAMES, cases, relative_error
from support.kernels.recurrence import (
    bounds_of,
    make_states,
    on_cpu,
    part_of,
    random_delta,
    random_state_space,
    written,
)
from torch import Tensor

from baton.kernels import reference
from baton.kernels.recurrence.causal_conv import causal_conv
from baton.kernels.recurrence.delta_step import gated_delta_step
from baton.kernels.recurrence.gated_norm import gated_rms_norm
from baton.kernels.recurrence.state_space_step import state_space_step
from baton.kernels.recurrence.tiles import step_tiling
from baton.kernels.recurrent_states import States

Kind = Literal["delta", "channel", "space"]
KERNELS: dict[str, Any] = {"delta": gated_delta_step, "channel": gated_delta_step, "space": state_space_step}
ORACLES: dict[str, Any] = {
    "delta": reference.gated_delta_step,
    "channel": reference.gated_delta_step,
    "space": reference.state_space_step,
}


class Shape(NamedTuple):
    """The shape that a kernel is compiled for."""

    kind: Kind
    groups: int  # key heads, or groups of B and C
    heads: int
    rows: int  # of a state
    columns: int
    pieces: int
    dtype: torch.dtype
    stored: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind}-{self.rows}x{self.columns}-p{self.pieces}-{NAMES[self.dtype]}-{NAMES[self.stored]}"

    def states(self, num_seqs: int, device: str, **options: Any) -> States:
        sizes = (num_seqs, self.heads, self.rows, self.columns)
        return make_states(*sizes, pieces=self.pieces, dtype=self.stored, device=device, **options)

    def inputs(self, num_tokens: int, device: str) -> tuple[Any, ...]:
        sizes = (num_tokens, self.groups, self.heads, self.rows, self.columns)
        if self.kind == "space":
            return random_state_space(*sizes, limits=(0.05, 2.0), dtype=self.dtype, device=device)
        per_channel = self.kind == "channel"
        return random_delta(*sizes, per_channel=per_channel, dtype=self.dtype, device=device)


SMALL = [
    Shape("delta", 2, 4, 16, 32, 1, torch.float32, torch.float32),
    Shape("delta", 1, 2, 24, 48, 3, torch.float16, torch.float16),
    Shape("channel", 2, 2, 16, 16, 1, torch.float32, torch.float32),
    Shape("space", 1, 2, 16, 24, 1, torch.float32, torch.float32),
    Shape("space", 2, 4, 24, 64, 2, torch.float16, torch.float32),
]
GRID = [
    Shape("delta", 4, 8, 128, 128, 1, torch.bfloat16, torch.float32),
    Shape("delta", 16, 32, 128, 128, 2, torch.bfloat16, torch.bfloat16),
    Shape("channel", 8, 8, 128, 128, 1, torch.bfloat16, torch.float32),
    Shape("delta", 2, 2, 96, 64, 1, torch.float32, torch.float32),
    Shape("space", 8, 32, 128, 64, 1, torch.bfloat16, torch.float32),
    Shape("space", 1, 8, 256, 64, 4, torch.float16, torch.float32),
]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
@pytest.mark.parametrize("keeping", [False, True])
def test_steps_equal_the_reference(shape: Shape, device: str, keeping: bool) -> None:
    lengths = (1, 0, 3, 2, 1)
    inputs, bounds = shape.inputs(sum(lengths), device), bounds_of(lengths, device)
    keep = torch.tensor((1, 0, 2, 0, 1), dtype=torch.int32, device=device) if keeping else None
    states = shape.states(len(lengths), device, fresh=(2,), dropped=(4,))
    theirs = States(*(part.cpu().clone() for part in (states.pool, states.read, states.write)))
    out = KERNELS[shape.kind](*inputs, states, bounds, keep=keep)
    moved = [on_cpu(value) for value in inputs]
    expected = ORACLES[shape.kind](*moved, theirs, bounds.cpu(), keep=on_cpu(keep))
    assert relative_error(out.cpu(), expected) <= BOUNDS[shape.dtype]
    stored = max(BOUNDS[shape.stored], 1e-5)
    assert relative_error(states.pool.cpu(), theirs.pool) <= stored


@pytest.mark.parametrize(("shape", "device"), cases(SMALL[:1] + SMALL[2:4], GRID[:1]))
def test_accepted_tokens_leave_what_single_steps_leave(shape: Shape, device: str) -> None:
    """Drafts that are verified together, and of which some are kept, change no bit."""
    inputs = shape.inputs(6, device)
    run = KERNELS[shape.kind]
    states = shape.states(1, device, in_place=True)
    single = States(states.pool.clone(), states.read, states.write)

    def take(first: int, end: int) -> list[Any]:
        tokens = slice(first, end)
        return [part_of(value, tokens) for value in inputs[:4]] + list(inputs[4:])

    def keep(count: int) -> Tensor:
        return torch.tensor([count], dtype=torch.int32, device=device)

    # Token 0 is certain, drafts 1 to 3 are verified; 1 and 2 are accepted, and replayed before 3, 4 and 5.
    first = run(*take(0, 4), states, bounds_of([4], device), keep=keep(1))
    second = run(*take(1, 6), states, bounds_of([5], device), keep=keep(5))
    alone = [run(*take(token, token + 1), single, bounds_of([1], device)) for token in range(6)]
    assert torch.equal(first, torch.cat(alone[:4]))
    assert torch.equal(second, torch.cat(alone[1:]))
    assert torch.equal(written(states, shape.heads), written(single, shape.heads))


class ConvShape(NamedTuple):
    """A convolution, and the lengths that it is tried with."""

    channels: int
    taps: int
    pieces: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    biased: bool = False
    silu: bool = True

    def __str__(self) -> str:
        return f"c{self.channels}-k{self.taps}-p{self.pieces}-{NAMES[self.dtype]}-n{len(self.lengths)}"


SMALL_CONV = [
    ConvShape(64, 4, 2, torch.float32, (1, 0, 3, 1, 2)),
    ConvShape(96, 3, 1, torch.float16, (1, 70, 0, 33, 64), biased=True, silu=False),
    ConvShape(32, 4, 1, torch.float32, (65, 40), biased=True),
]
GRID_CONV = [
    ConvShape(8192, 4, 4, torch.bfloat16, (1,) * 256),
    ConvShape(2048, 3, 1, torch.bfloat16, (1000, 0, 1, 64, 3), silu=False),
    ConvShape(10240, 4, 1, torch.float16, (4096,), biased=True),
]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL_CONV, GRID_CONV))
@pytest.mark.parametrize("in_place", [False, True])
def test_convolutions_equal_the_reference(shape: ConvShape, device: str, in_place: bool) -> None:
    num_seqs = len(shape.lengths)
    wide = torch.randn(sum(shape.lengths), shape.channels + 32).to(device, shape.dtype)
    x, bounds = wide[:, : shape.channels], bounds_of(shape.lengths, device)
    weight = torch.randn(shape.channels, shape.taps).to(device, shape.dtype)
    bias = torch.randn(shape.channels).to(device, shape.dtype) if shape.biased else None
    half = torch.tensor([length // 2 for length in shape.lengths], dtype=torch.int32, device=device)
    for keep in (None, half):
        states = make_states(
            num_seqs,
            1,
            shape.taps - 1,
            shape.channels,
            pieces=shape.pieces,
            fresh=(0,),
            in_place=in_place,
            dtype=shape.dtype,
            device=device,
        )
        theirs = States(*(part.cpu().clone() for part in (states.pool, states.read, states.write)))
        out = causal_conv(x, weight, states, bounds, bias=bias, silu=shape.silu, keep=keep)
        moved = [on_cpu(value) for value in (x, weight)]
        expected = reference.causal_conv(
            *moved, theirs, bounds.cpu(), bias=on_cpu(bias), silu=shape.silu, keep=on_cpu(keep)
        )
        assert relative_error(out.cpu(), expected) <= BOUNDS[shape.dtype]
        assert torch.equal(states.pool.cpu(), theirs.pool)


SMALL_NORM = [(3, 2, 16, torch.float32), (5, 3, 24, torch.float16)]
GRID_NORM = [(256, 8, 128, torch.bfloat16), (33, 1, 8192, torch.bfloat16), (7, 8, 1024, torch.float16)]


@pytest.mark.parametrize(("case", "device"), cases(SMALL_NORM, GRID_NORM))
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_norms_equal_the_reference(
    case: tuple[int, int, int, torch.dtype],
    device: str,
    norm_first: bool,
    activation: Literal["silu", "sigmoid"],
    shared: bool,
) -> None:
    num_rows, groups, size, dtype = case
    x = torch.randn(num_rows, groups * size).to(device, dtype)
    gate = torch.randn(num_rows, groups * size + 8).to(device, dtype)[:, : groups * size]
    weight = torch.rand(size if shared else groups * size).to(device, dtype)
    options: Any = {"group_size": size, "norm_first": norm_first, "activation": activation}
    out = gated_rms_norm(x, gate, weight, 1e-5, **options)
    expected = reference.gated_rms_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-5, **options)
    assert relative_error(out.cpu(), expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("shape", [shape for shape in GRID if shape.dtype == torch.bfloat16], ids=str)
def test_steps_compile_for_hopper_without_spills(shape: Shape) -> None:
    with compiled_for_hopper() as found:
        KERNELS[shape.kind](*shape.inputs(4, "cpu"), shape.states(4, "cpu"), bounds_of([1] * 4))
    (kernel,) = found
    assert kernel.spilled == 0
    # The programs of a multiprocessor have 64 KB of states in flight, more than the latency needs.
    itemsize = torch.empty(0, dtype=shape.stored).element_size()
    columns, num_warps = step_tiling(shape.rows, shape.columns // shape.pieces, itemsize)
    registers = -(-kernel.registers // 8) * 8  # a multiprocessor gives 65536 to threads, in eights
    assert 65536 // (registers * 32 * num_warps) * shape.rows * columns * itemsize >= 64 << 10


def test_steps_read_tokens_with_gaps_and_refuse_others() -> None:
    query, key, value, gates = random_delta(4, 2, 2, 16, 16, per_channel=False)
    states = make_states(4, 2, 16, 16)
    with pytest.raises(ValueError, match="each token must be contiguous"):
        gated_delta_step(query.transpose(1, 2), key, value, gates, states, bounds_of([1] * 4))
