"""Kernels of recurrences in chunks against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

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

from baton.kernels import reference
from baton.kernels.recurrence.delta_chunks import gated_delta_chunks
from baton.kernels.recurrence.state_space_chunks import state_space_chunks
from baton.kernels.recurrent_states import DeltaGates, States
from baton.kernels.shared_memory import shared_memory

KERNELS: dict[str, Any] = {
    "delta": gated_delta_chunks,
    "channel": gated_delta_chunks,
    "space": state_space_chunks,
}
ORACLES: dict[str, Any] = {
    "delta": reference.gated_delta_chunks,
    "channel": reference.gated_delta_chunks,
    "space": reference.state_space_chunks,
}


class Shape(NamedTuple):
    """The shape that a kernel is compiled for, and the lengths of its sequences."""

    kind: str
    groups: int  # key heads, or groups of B and C
    heads: int
    rows: int  # of a state
    columns: int
    pieces: int
    dtype: torch.dtype
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{self.rows}x{self.columns}-p{self.pieces}-{NAMES[self.dtype]}-n{len(self.lengths)}"

    def states(self, device: str, **options: Any) -> States:
        sizes = (len(self.lengths), self.heads, self.rows, self.columns)
        return make_states(*sizes, pieces=self.pieces, device=device, **options)

    def inputs(self, num_tokens: int, device: str) -> tuple[Any, ...]:
        sizes = (num_tokens, self.groups, self.heads, self.rows, self.columns)
        if self.kind == "space":
            return random_state_space(*sizes, limits=(0.05, 2.0), dtype=self.dtype, device=device)
        per_channel = self.kind == "channel"
        return random_delta(*sizes, per_channel=per_channel, dtype=self.dtype, device=device)


SMALL = [
    Shape("delta", 1, 2, 16, 16, 1, torch.float32, (130, 0, 1)),
    Shape("delta", 1, 1, 24, 32, 2, torch.float16, (64, 65)),
    Shape("channel", 1, 1, 16, 16, 1, torch.float32, (1, 90)),
    Shape("channel", 1, 1, 24, 16, 1, torch.float16, (64, 3)),
    Shape("space", 1, 2, 16, 16, 1, torch.float32, (130, 0, 1)),
    Shape("space", 1, 1, 24, 32, 2, torch.float16, (64, 65)),
]
GRID = [
    Shape("delta", 4, 8, 128, 128, 1, torch.bfloat16, (4096,)),
    Shape("delta", 4, 8, 128, 128, 2, torch.bfloat16, (1, 63, 64, 65, 0, 500)),
    Shape("delta", 2, 2, 96, 64, 1, torch.float32, (300, 7)),
    Shape("delta", 2, 4, 32, 64, 1, torch.bfloat16, (100, 3, 40)),
    Shape("channel", 8, 8, 128, 128, 1, torch.bfloat16, (4096, 100)),
    Shape("channel", 2, 2, 64, 64, 1, torch.float32, (300, 7)),
    Shape("space", 8, 32, 128, 64, 1, torch.bfloat16, (4096,)),
    Shape("space", 1, 8, 256, 64, 2, torch.bfloat16, (1, 63, 64, 65, 0, 500)),
    Shape("space", 1, 8, 128, 64, 1, torch.float32, (300, 7)),
]


@pytest.mark.parametrize(("shape", "device"), cases(SMALL, GRID))
def test_chunks_equal_the_reference(shape: Shape, device: str) -> None:
    inputs, bounds = shape.inputs(sum(shape.lengths), device), bounds_of(shape.lengths, device)
    last = len(shape.lengths) - 1
    states = shape.states(device, fresh=(0,), dropped=(last,) if last > 1 else ())
    theirs = States(*(part.cpu().clone() for part in (states.pool, states.read, states.write)))
    out = KERNELS[shape.kind](*inputs, states, bounds)
    expected = ORACLES[shape.kind](*(on_cpu(value) for value in inputs), theirs, bounds.cpu())
    assert relative_error(out.cpu(), expected) <= BOUNDS[shape.dtype]
    assert relative_error(written(states, shape.heads).cpu(), written(theirs, shape.heads)) <= BOUNDS[shape.dtype]


@pytest.mark.parametrize(("shape", "device"), cases([SMALL[0], SMALL[2], SMALL[4]], GRID[2:3]))
def test_splits_at_chunks_change_no_bit(shape: Shape, device: str) -> None:
    alone = shape._replace(lengths=(100,))
    inputs = alone.inputs(100, device)
    run = KERNELS[shape.kind]
    whole = alone.states(device, fresh=(0,))
    split = alone.states(device, fresh=(0,))
    expected = run(*inputs, whole, bounds_of([100], device))
    head, tail = ([part_of(value, tokens) for value in inputs[:4]] for tokens in (slice(0, 64), slice(64, 100)))
    run(*head, *inputs[4:], split, bounds_of([64], device))
    again = States(split.pool, split.write, split.write)
    assert torch.equal(run(*tail, *inputs[4:], again, bounds_of([36], device)), expected[64:])
    assert torch.equal(written(again, shape.heads), written(whole, shape.heads))


@pytest.mark.parametrize(("kind", "device"), cases(["delta", "channel"], ["delta", "channel"]))
def test_equal_keys_and_strong_decays_lose_nothing(kind: str, device: str) -> None:
    """Equal keys give powers of the system that overflow fp32; strong decays an inverse of exp that does."""
    query, key, value, gates = random_delta(70, 1, 1, 16, 16, per_channel=kind == "channel", device=device)
    for keys, shift in ((key[:1].expand_as(key).contiguous(), -30.0), (key, 40.0)):
        own = DeltaGates(gates.decay + shift, gates.beta + 4, gates.log_rate, gates.bias)
        states = make_states(1, 1, 16, 16, device=device)
        theirs = States(*(part.cpu().clone() for part in (states.pool, states.read, states.write)))
        out = gated_delta_chunks(query, keys, value, own, states, bounds_of([70], device))
        moved = [on_cpu(part) for part in (query, keys, value, own)]
        expected = reference.gated_delta_step(*moved, theirs, bounds_of([70]))
        assert relative_error(out.cpu(), expected) <= 1e-4
        assert relative_error(written(states, 1).cpu(), written(theirs, 1)) <= 1e-4


@pytest.mark.parametrize("shape", [GRID[0], GRID[4], GRID[6]], ids=str)
def test_chunks_compile_for_hopper_within_its_memory(shape: Shape) -> None:
    small = shape._replace(lengths=(70,))
    with compiled_for_hopper() as found:
        KERNELS[shape.kind](*small.inputs(70, "cpu"), small.states("cpu"), bounds_of([70]))
    assert found
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= shared_memory(torch.device("cpu")), kernel
